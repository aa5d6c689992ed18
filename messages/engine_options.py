"""The options of an engine process, defined once.

`loradock serve` makes its engine options from `EngineOptions`, the supervisor writes an engine's
command line from `EngineArguments`, and the engine makes its parser from the same Struct. Values
are validated by the engine's configurations (`engine/config.py`), which have the same field names
and defaults.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

LogFormat = Literal["console", "json"]
"""The format of the log of every process on stderr."""

LogLevel = Literal["debug", "info", "warning", "error"]
"""The least important lines of the log that are written."""

_NUMBER: Final = {"metavar": "NUMBER"}


LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
LORA_DTYPES: Final = ("auto", "float16", "bfloat16", "float32")
TASKS: Final = ("auto", "generate", "embed", "classify")
POOLINGS: Final = ("auto", "mean", "cls", "last")
QUANTIZATIONS: Final = (
    *("none", "torchao-int8", "torchao-int4", "bitsandbytes-8bit", "bitsandbytes-4bit", "fp8"),
)


class EngineOptions(Struct, frozen=True):
    """The options that `loradock serve` passes on to the engine unchanged."""

    max_lora_rank: Annotated[
        int,
        Meta(
            ge=1,
            description="Largest LoRA rank to accept: 1, 8, 16, 32, 64, 128, 256, 320 or 512. "
            "Adapters with a higher rank are refused.",
            extra={"metavar": "RANK", "choices": tuple(map(str, LORA_RANKS))},
        ),
    ] = 16
    lora_dtype: Annotated[
        str,
        Meta(
            description="Data type of adapter weights: float16, bfloat16, float32, or auto for the "
            "base model's.",
            extra={"metavar": "NAME", "choices": LORA_DTYPES},
        ),
    ] = "auto"
    target_modules: Annotated[
        tuple[str, ...],
        Meta(
            description="Wrap only this module, a name suffix or a full name; repeat for several. "
            "Default: every module that can be wrapped.",
            extra={"metavar": "MODULE"},
        ),
    ] = ()
    fully_sharded_loras: Annotated[
        bool,
        Meta(
            description="With --tensor-parallel-size above 1: split both LoRA matrices over the "
            "processes instead of only one."
        ),
    ] = False
    default_mm_loras: Annotated[
        tuple[str, ...],
        Meta(
            description="Adapter of requests that contain images and name no adapter: image=PATH. "
            "Default: none.",
            extra={"metavar": "MODALITY=PATH"},
        ),
    ] = ()
    enable_tower_connector_lora: Annotated[
        bool,
        Meta(description="Apply adapters to a multimodal model's tower and connector too."),
    ] = False
    specialize_active_lora: Annotated[
        bool,
        Meta(
            description="Launch kernels sized for the adapters in a batch instead of for all slots."
        ),
    ] = False
    dual_stream: Annotated[
        bool,
        Meta(
            description="Compute adapters concurrently with the base layer, on a second CUDA "
            "stream. CUDA only; off with --fully-sharded-loras."
        ),
    ] = False
    batch_invariant: Annotated[
        bool,
        Meta(description="Compute an adapter's output bit for bit the same in every batch."),
    ] = False
    enable_mixed_moe_lora_format: Annotated[
        bool,
        Meta(
            description="Store fused (3-D) expert adapters by projection, as 2-D ones; both are "
            "served without it too."
        ),
    ] = False
    allow_pickled_weights: Annotated[
        bool,
        Meta(
            description="Accept .bin and .pt weights of adapters without a safetensors file; only "
            "tensors are unpickled."
        ),
    ] = False
    device: Annotated[
        str,
        Meta(
            description="Where the model runs: cpu, cuda, cuda:NUMBER, or auto for the first CUDA "
            "device if there is one, else the CPU.",
            extra={"metavar": "DEVICE"},
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Meta(
            description="Data type of the base model: float16, bfloat16, float32, or auto for the "
            "saved one. On a CPU, auto is float32 where this machine computes it much faster.",
            extra={"metavar": "NAME", "choices": LORA_DTYPES},
        ),
    ] = "auto"
    pin_memory: Annotated[
        bool | None,
        Meta(description="Page-lock the memory of staged adapters. Default: only on CUDA."),
    ] = None
    file_threads: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Threads that read adapters, and the same number that read images.",
            extra=_NUMBER,
        ),
    ] = 2
    max_num_seqs: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="Largest number of sequences processed together.",
            extra=_NUMBER,
        ),
    ] = 64
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000_000,
            description="Largest number of tokens per step; longer prompts are processed in "
            "chunks, so that running sequences continue meanwhile. 0 chooses it from the model's "
            "speed when it is loaded.",
            extra=_NUMBER,
        ),
    ] = 0
    queue_requests_max: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Largest number of requests that wait in the engine.",
            extra=_NUMBER,
        ),
    ] = 1024
    kv_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory for the keys and values of requests, per process; requests beyond "
            "it wait. Default: 0, which chooses it from the memory of the device.",
            extra={"metavar": "BYTES"},
        ),
    ] = 0
    paged_attention: Annotated[
        bool,
        Meta(
            description="Keep keys and values in blocks of tokens, without padding, where the "
            "model allows it."
        ),
    ] = True
    prefix_caching: Annotated[
        bool,
        Meta(
            description="Reuse the keys and values of a prompt's beginning for requests of the "
            "same adapter version that begin with the same tokens."
        ),
    ] = True
    context_tokens_max: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000_000,
            description="Largest number of tokens of prompt and output together; 0 for the model's "
            "own limit.",
            extra=_NUMBER,
        ),
    ] = 0
    task: Annotated[
        str,
        Meta(
            description="Task of the model: generate, embed, classify, or auto for what its "
            "config.json specifies.",
            extra={"metavar": "TASK", "choices": TASKS},
        ),
    ] = "auto"
    pooling: Annotated[
        str,
        Meta(
            description="How the hidden states of an input become one vector: mean, cls, last, or "
            "auto for what the model's files specify.",
            extra={"metavar": "KIND", "choices": POOLINGS},
        ),
    ] = "auto"
    normalize: Annotated[
        bool | None,
        Meta(
            description="Scale embeddings to length 1. Default: what the model's files specify.",
        ),
    ] = None
    expert_parallel: Annotated[
        bool,
        Meta(
            description="With --tensor-parallel-size above 1: keep some experts whole in each "
            "process instead of some columns of every expert."
        ),
    ] = False
    capture_steps: Annotated[
        bool,
        Meta(
            description="Capture decode steps as CUDA graphs and replay them, where the model "
            "allows it. CUDA only."
        ),
    ] = False
    quantization: Annotated[
        str,
        Meta(
            description="Quantize the model while it is loaded: torchao-int8, torchao-int4, "
            "bitsandbytes-8bit, bitsandbytes-4bit or fp8. Default: as it was saved.",
            extra={"metavar": "NAME", "choices": QUANTIZATIONS},
        ),
    ] = "none"
    adapter_weights: Annotated[
        tuple[str, ...],
        Meta(
            description="Share of an adapter in the steps while requests of several adapters wait: "
            "a number from 1 to 1000, 1 for adapters without one. Repeat for several.",
            extra={"metavar": "ADAPTER=NUMBER"},
        ),
    ] = ()


class EngineArguments(EngineOptions, frozen=True, kw_only=True):
    """The command line of an engine process."""

    connect: Annotated[
        str,
        Meta(
            description="The controller's ipc:// socket for engines, or its tcp:// address for "
            "engines: two ports above the address that `loradock serve --listen` names.",
            extra={"metavar": "ADDRESS"},
        ),
    ]
    model: Annotated[
        str, Meta(description="Directory of the base model.", extra={"metavar": "DIRECTORY"})
    ]
    adapter_roots: Annotated[
        tuple[str, ...],
        Meta(
            description="Directory to load adapters from; repeat for several. Default: none, so "
            "that no adapter can be loaded.",
            extra={"metavar": "DIRECTORY"},
        ),
    ] = ()
    max_loras: Annotated[
        int,
        Meta(
            description="Device slots: the largest number of adapters in one batch.", extra=_NUMBER
        ),
    ] = 1
    device_bytes_max: Annotated[
        int, Meta(description="Device memory for adapters.", extra={"metavar": "BYTES"})
    ] = 1 << 30
    key: Annotated[
        str,
        Meta(
            description="File of this engine's key pair, whose public key the controller allows "
            "as an engine's; only its user may be able to read it.",
            extra={"metavar": "FILE"},
        ),
    ]
    server_key: Annotated[
        str,
        Meta(
            description="File of the controller's public key: keys/server.key.pub in its "
            "directory.",
            extra={"metavar": "FILE"},
        ),
    ]
    log_format: Annotated[
        str,
        Meta(
            description="Format of the lines on stderr: console or json.",
            extra={"metavar": "NAME"},
        ),
    ] = "console"
    log_level: Annotated[
        str,
        Meta(
            description="Least important lines on stderr: debug, info, warning or error.",
            extra={"metavar": "NAME"},
        ),
    ] = "info"
    parent_pid: Annotated[
        int | None,
        Meta(
            description="Process id of the supervisor: the engine ends when that process has.",
            extra={"metavar": "PID"},
        ),
    ] = None
    progress: Annotated[
        str,
        Meta(
            description="Shared memory in which the engine reports the step of its main loop to "
            "its supervisor. Default: none.",
            extra={"metavar": "FILE"},
        ),
    ] = ""
    step_timeout_ms: Annotated[
        int,
        Meta(
            description="The bound of a step, in milliseconds, that is reported there.",
            extra=_NUMBER,
        ),
    ] = 300_000
    engine_id: Annotated[
        str,
        Meta(
            description="Name of this engine process, unique for each start. Default: --launch-id "
            "and a random text.",
            extra={"metavar": "NAME"},
        ),
    ] = ""
    launch_id: Annotated[
        str,
        Meta(
            description="Name of the supervisor's run: its controller takes an engine of another "
            "one for ended. Default: none.",
            extra={"metavar": "NAME"},
        ),
    ] = ""
