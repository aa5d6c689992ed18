// A device guard for CUDA that does nothing, so that a build of PyTorch without CUDA accepts tensors
// whose device is `cuda:0`.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
