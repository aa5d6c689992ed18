"""The options of an engine, and what its process gets as JSON.

`LoRAOptions` and `EngineOptions` are dataclasses because the engine's public configurations
(`engine/config.py`) are: `EngineConfig` extends `EngineOptions`, and `LoRAConfig` has the names and
the defaults of `LoRAOptions`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta, Struct

from loradock.messages.options import option

LogFormat = Literal["console", "json"]
"""The format of the log of every process on stderr."""

LogLevel = Literal["debug", "info", "warning", "error"]
"""The least important lines of the log that are written."""

LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that `max_lora_rank` can have."""

DTYPES: Final = ("float16", "bfloat16", "float32")
"""The data types of weights."""

TASKS: Final = ("generate", "embed", "classify")
"""The tasks that an engine can have."""

POOLINGS: Final = ("mean", "cls", "last")
"""Ways to reduce the hidden states of a text's tokens to one vector."""

UNQUANTIZED: Final = "none"
"""The quantization of a model that is loaded as it was saved."""

QUANTIZATIONS: Final = (
    *("torchao-int8", "torchao-int4", "bitsandbytes-8bit", "bitsandbytes-4bit", "fp8"),
)
"""Formats in which a model can be quantized while it is loaded."""

ATTENTION_BACKENDS: Final = ("auto", "torch")
"""Implementations of attention over blocks."""

ADAPTER_WEIGHT_MAX: Final = 1000
DEVICE_BYTES_DEFAULT: Final = 1 << 30
PINNED_BYTES_DEFAULT: Final = 4 << 30
STEP_TIMEOUT_MS: Final = 300_000


AdapterRoots = Annotated[
    tuple[str, ...],
    option(
        "Directory to load adapters from; repeat for several. Adapters outside are refused; links "
        "can lead to places below a root. Default: none, so that no adapter can be loaded.",
        metavar="DIRECTORY",
        is_common=True,
    ),
]

MaxLoras = Annotated[
    int,
    option(
        "Device slots: the largest number of different adapters in one batch.",
        ge=1,
        le=65_536,
        former="--slots",
        is_common=True,
    ),
]

TensorParallelSize = Annotated[
    int,
    option(
        "Number of processes that hold the model together, one per device.",
        ge=1,
        le=1024,
        is_common=True,
    ),
]


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """The options of LoRA: ranks, data type, modules and how layers compute it."""

    PANEL: ClassVar = "LoRA"

    max_lora_rank: Annotated[
        int,
        option(
            "Largest LoRA rank to accept: 1, 8, 16, 32, 64, 128, 256, 320, 512, or auto for the "
            "largest below the roots. Adapters with a higher rank are refused.",
            metavar="RANK",
            choices=LORA_RANKS,
            is_automatic=True,
            is_common=True,
        ),
    ] = 16
    lora_dtype: Annotated[
        str,
        option(
            "Data type of adapter weights: float16, bfloat16, float32, or auto for the base "
            "model's.",
            metavar="NAME",
            choices=("auto", *DTYPES),
        ),
    ] = "auto"
    target_modules: Annotated[
        tuple[str, ...] | None,
        option(
            "Wrap only this module, a name suffix or a full name; repeat for several. Default: "
            "every module that can be wrapped.",
            metavar="MODULE",
        ),
    ] = None
    fully_sharded_loras: Annotated[
        bool,
        option(
            "With --tensor-parallel-size above 1: split both LoRA matrices over the processes "
            "instead of only one."
        ),
    ] = False
    default_mm_loras: Annotated[
        dict[str, str] | None,
        option(
            "Adapter of requests that contain images and name no adapter: image=PATH. Default: "
            "none.",
            metavar="MODALITY=PATH",
        ),
    ] = None
    enable_tower_connector_lora: Annotated[
        bool, option("Apply adapters to a multimodal model's tower and connector too.")
    ] = False
    specialize_active_lora: Annotated[
        bool, option("Launch kernels sized for the adapters in a batch instead of for all slots.")
    ] = False
    dual_stream: Annotated[
        bool | None,
        option(
            "Compute adapters concurrently with the base layer, on a second CUDA stream. CUDA "
            "only; off with --fully-sharded-loras. Default: off, unless the variable "
            "VLLM_LORA_ENABLE_DUAL_STREAM is 1."
        ),
    ] = None
    batch_invariant: Annotated[
        bool, option("Compute an adapter's output bit for bit the same in every batch.")
    ] = False
    enable_mixed_moe_lora_format: Annotated[
        bool,
        option(
            "Store fused (3-D) expert adapters by projection, as 2-D adapters; both are served "
            "without it too."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an engine and of its model."""

    PANEL: ClassVar = "Engine"

    device: Annotated[
        str,
        option(
            "Where the model runs: cpu, cuda, cuda:NUMBER, or auto for the first CUDA device if "
            "there is one, else the CPU.",
            metavar="DEVICE",
            is_common=True,
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        option(
            "Data type of the base model: float16, bfloat16, float32, or auto for the saved one. "
            "On a CPU, auto is float32 if this machine computes it much faster.",
            metavar="NAME",
            choices=("auto", *DTYPES),
            is_common=True,
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        option(
            "Quantize the model while it is loaded: torchao-int8, torchao-int4, bitsandbytes-8bit, "
            "bitsandbytes-4bit or fp8. Default: as it was saved.",
            metavar="NAME",
            choices=(UNQUANTIZED, *QUANTIZATIONS),
            is_common=True,
        ),
    ] = UNQUANTIZED
    max_model_len: Annotated[
        int,
        option(
            "Largest number of tokens of prompt and output together; 0 for the model's own limit.",
            former="--context-tokens-max",
            ge=0,
            le=100_000_000,
            is_common=True,
        ),
    ] = 0
    max_num_seqs: Annotated[
        int,
        option("Largest number of sequences processed together.", ge=1, le=65_536, is_common=True),
    ] = 64
    max_num_batched_tokens: Annotated[
        int,
        option(
            "Largest number of tokens per step; longer prompts are processed in chunks, so that "
            "running sequences continue meanwhile. 0 chooses it from what steps cost, also while "
            "serving.",
            ge=0,
            le=100_000_000,
        ),
    ] = 0
    kv_cache_bytes: Annotated[
        int,
        option(
            "Memory for the keys and values of requests, per process; requests beyond it wait. "
            "Default: 0, which chooses it from the memory of the device.",
            ge=0,
            unit="bytes",
            is_common=True,
        ),
    ] = 0
    queue_requests_max: Annotated[
        int,
        option(
            "Largest number of requests that wait in the engine. A client with less than an equal "
            "share of them is accepted beyond it, up to twice as many in all.",
            ge=1,
            le=10_000_000,
            former="--queue-requests-max",
        ),
    ] = 1024
    paged_attention: Annotated[
        bool,
        option(
            "Keep keys and values in blocks of tokens, without padding, if the model allows it."
        ),
    ] = True
    prefix_caching: Annotated[
        bool,
        option(
            "Reuse the keys and values, or the recurrent states, of a prompt's beginning for "
            "requests of the same adapter version that begin with the same tokens."
        ),
    ] = True
    attention_backend: Annotated[
        str,
        option(
            "How keys and values in blocks are attended to: auto for a kernel on CUDA, if its "
            "results at start are the model's own, or torch for PyTorch's functions.",
            metavar="NAME",
            choices=ATTENTION_BACKENDS,
        ),
    ] = "auto"
    capture_steps: Annotated[
        bool | None,
        option(
            "Capture decode steps as CUDA graphs when the engine starts, and replay them. CUDA "
            "only. Default: on with CUDA, if the model allows it."
        ),
    ] = None
    expert_parallel: Annotated[
        bool,
        option(
            "With --tensor-parallel-size above 1: keep some experts whole in each process instead "
            "of some columns of every expert."
        ),
    ] = False
    adapter_weights: Annotated[
        dict[str, Annotated[int, Meta(ge=1, le=ADAPTER_WEIGHT_MAX)]] | None,
        option(
            "Share of an adapter in the steps while requests of several adapters wait: a number "
            "from 1 to 1000, 1 by default. Repeat for several. Default: none.",
            metavar="ADAPTER=NUMBER",
        ),
    ] = None
    task: Annotated[
        str,
        option(
            "Task of the model: generate, embed, classify, or auto for what its config.json "
            "specifies.",
            metavar="TASK",
            choices=("auto", *TASKS),
        ),
    ] = "auto"
    pooling: Annotated[
        str,
        option(
            "How the hidden states of an input become one vector: mean, cls, last, or auto for "
            "what the model's files specify.",
            metavar="KIND",
            choices=("auto", *POOLINGS),
        ),
    ] = "auto"
    normalize: Annotated[
        bool | None,
        option("Scale embeddings to length 1. Default: what the model's files specify."),
    ] = None
    pin_memory: Annotated[
        bool | None,
        option("Page-lock the memory of staged adapters. Default: only on CUDA."),
    ] = None
    file_threads: Annotated[
        int,
        option("Threads that read adapters, and the same number that read images.", ge=1, le=1024),
    ] = 2
    allow_pickled_weights: Annotated[
        bool,
        option(
            "Accept .bin and .pt weights of adapters without a safetensors file; only tensors are "
            "unpickled."
        ),
    ] = False
    isolate_reading: Annotated[
        bool,
        option(
            "Read and check each adapter in a separate process without network, files or other "
            "rights, whose end is one refused adapter. Slower; for an engine of one process."
        ),
    ] = False


class EngineStart(Struct, frozen=True, kw_only=True):
    """The options of an engine that is started by itself, and how it reaches its controller."""

    PANEL: ClassVar = "Engine process"

    connect: Annotated[
        str,
        option(
            "The controller's ipc:// socket for engines, or its tcp:// address for engines: two "
            "ports above the address that `loradock serve --listen` names.",
            metavar="ADDRESS",
            is_common=True,
        ),
    ]
    model: Annotated[
        str,
        option("Directory of the base model.", metavar="DIRECTORY", is_common=True),
    ]
    adapter_roots: AdapterRoots = ()
    tensor_parallel_size: TensorParallelSize = 1
    max_loras: MaxLoras = 1
    device_bytes_max: Annotated[
        int,
        option("Device memory for adapters.", ge=1, le=1 << 50, unit="bytes", is_common=True),
    ] = DEVICE_BYTES_DEFAULT
    pinned_bytes_max: Annotated[
        int,
        option(
            "Host memory for staged adapters, per process; on a CUDA device it is page-locked, and "
            "reserved at start.",
            ge=1,
            le=1 << 50,
            unit="bytes",
        ),
    ] = PINNED_BYTES_DEFAULT
    key: Annotated[
        str,
        option(
            "File of this engine's key pair, whose public key the controller allows as an "
            "engine's; only its user must be able to read it.",
            metavar="FILE",
            is_common=True,
        ),
    ]
    server_key: Annotated[
        str,
        option(
            "File of the controller's public key: keys/server.key.pub in its directory.",
            metavar="FILE",
            is_common=True,
        ),
    ]
    log_format: Annotated[LogFormat, option("Format of the log on stderr.", is_common=True)] = (
        "console"
    )
    log_level: Annotated[LogLevel, option("Least important lines of the log that are written.")] = (
        "info"
    )


class EngineProcess(Struct, frozen=True, kw_only=True):
    """The JSON argument of an engine process.

    `parent_pid`: the supervisor's, with which the engine ends; None without one. `progress`: the
    shared memory in which it reports its steps to its supervisor. `launch_id`: the supervisor's
    run, with which the engine's id begins; its controller takes an engine of another run for ended.
    """

    start: EngineStart
    lora: LoRAOptions = LoRAOptions()
    engine: EngineOptions = EngineOptions()
    parent_pid: int | None = None
    progress: str = ""
    step_timeout_ms: int = STEP_TIMEOUT_MS
    launch_id: str = ""
