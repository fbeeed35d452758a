"""The contract with vLLM, as far as it cannot be read from our code, and the differences between supported versions.

`tests/versions/vllm_snapshot.py` reads from our source what our code imports, calls, reads and overrides.
`tests/versions/names.txt` has these facts for each supported version. This file has the rows in which versions differ,
and facts that no name and no signature shows.

Invariant: `tests/versions/test_compat.py` compares the snapshot with the installed vLLM, our code with all snapshots,
and the rows with both. So the next vLLM fails there first, line by line. Code that depends on a difference calls
`has(ROW)`, and nothing else reads the version.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from vllm.version import __version__ as vllm_version

from vllm_rollout.versions import SUPPORTED_VLLM, minor_of, vllm_refusal


def check_vllm_version(version: str = vllm_version) -> None:
    """Raises: RuntimeError if vLLM is not a supported version."""
    if refusal := vllm_refusal(version):
        raise RuntimeError(refusal)


Kind = Literal["has", "takes", "adds", "replaces", "flag", "does"]
"""Kinds of facts:

has         a module or class has this name
takes       a function, method or class can be called with these parameters: names for positions, `name=` for keywords
adds        a name that we put on vLLM's class: vLLM must not use it
replaces    a name that we replace in its module, and the function that must look it up there when it is called
flag        a setting of `vllm serve` that we read or set
does        a function whose behavior no name and no signature shows. parameters: text in its source for this behavior
"""


class Fact(NamedTuple):
    """A property of vLLM on which the adapter relies."""

    kind: Kind
    of: str
    """Module, or class or function in its module."""
    name: str
    parameters: str = ""
    since: str = SUPPORTED_VLLM[0]
    """First supported version with this fact."""
    until: str = SUPPORTED_VLLM[-1]
    """Last supported version with this fact."""

    def holds_for(self, version: str) -> bool:
        """True if a version has this fact. An unsupported version counts as the last supported one."""
        minor = minor_of(version)
        place = SUPPORTED_VLLM.index(minor) if minor in SUPPORTED_VLLM else len(SUPPORTED_VLLM) - 1
        return SUPPORTED_VLLM.index(self.since) <= place <= SUPPORTED_VLLM.index(self.until)


def has(fact: Fact) -> bool:
    """True if the installed vLLM has this fact."""
    return fact.holds_for(vllm_version)


VERIFIER = "vllm.v1.sample.rejection_sampler"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
COMPLETION = "vllm.outputs.CompletionOutput"
SPAN = "vllm.outputs.WeightVersionSpan"
CHAT_STREAM = "vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat"
TEXT_STREAM = "vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion"
CORE_CLIENT = "vllm.v1.engine.core_client"
API_PROCESSES = "vllm.v1.utils.APIServerProcessManager"
SERVE = "vllm serve"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
KV_MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
CORE = "vllm.v1.engine.core.EngineCore"

# Differences between the supported versions that code asks for
WEIGHT_SPANS = Fact("has", COMPLETION, "weight_versions", since="0.32")
LOGGING_FLAGS = Fact("has", "vllm.logger", "configure_logging_from_args", since="0.31")
SCALE_OUT_FLAG = Fact("flag", SERVE, "enable_scale_out", since="0.30")
STARTUP = Fact("has", "vllm.entrypoints.common.startup", "cli_env_setup", since="0.33")
RETRYABLE = Fact("has", "vllm.exceptions", "RetryableRequestError", since="0.32")
REJECTS_WHILE_PAUSED = Fact("has", "vllm.v1.engine.core.EngineCoreProc", "reject_new_requests", since="0.33")
DEFERRED_WAITING = Fact("has", SCHEDULER, "deferred_waiting", since="0.31")
ACTIVE_LIMIT = Fact("has", SCHEDULER, "max_num_active_reqs", since="0.31")
ADOPTS_FOUND = Fact("does", KV_MANAGER, "allocate_slots", "and num_new_computed_tokens == 0", since="0.31")
# Before, each API process made its sockets and sent their addresses to the launcher.
RUST_LISTENERS = Fact(
    "takes",
    "vllm.v1.utils.RustFrontendProcessManager",
    "__init__",
    "binary_path= sock= args= input_listener= output_listener= engine_start_index= engine_count= data_parallel_size= "
    "stats_update_address=",
    since="0.32",
)
SKIPS_ZEROING = Fact(
    "takes", KV_MANAGER, "allocate_slots", "request num_new_tokens skip_zeroing_group_ids=", since="0.32"
)


class Feature(NamedTuple):
    """A feature of ours or of vLLM that some supported versions lack."""

    name: str
    row: Fact
    instead: str
    """Behavior of versions without the feature."""


FEATURES = (
    Feature("weight version spans", WEIGHT_SPANS, "only trajectories and turns of sessions have weight_versions"),
    Feature("logging flags", LOGGING_FLAGS, "set VLLM_LOGGING_LEVEL, VLLM_LOGGING_CONFIG_PATH"),
    Feature("refusing requests while paused", REJECTS_WHILE_PAUSED, "they wait until generation is resumed"),
)


def lacking(version: str = vllm_version) -> list[str]:
    """Features that a version lacks, each with the first version that has it and the replacement."""
    return [
        f"{feature.name} (since {feature.row.since}; {feature.instead})"
        for feature in FEATURES
        if not feature.row.holds_for(version)
    ]


ALSO = {
    # of objects without a named class, or by names in strings
    "vllm.engine.arg_utils.AsyncEngineArgs": "tensor_parallel_size",
    "vllm.entrypoints.openai.models.protocol.BaseModelPath": "name",
    "vllm.entrypoints.openai.models.serving.OpenAIServingModels": "base_model_paths lora_requests",
    "vllm.entrypoints.serve.engine.protocol.ErrorInfo": "message",
    "vllm.envs": "VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_CPU_OMP_THREADS_BIND VLLM_TARGET_DEVICE "
    "VLLM_WORKER_MULTIPROC_METHOD",
    "vllm.exceptions.VLLMValidationError": "parameter",
    "vllm.inputs.engine.EncoderDecoderInput": "decoder_prompt encoder_prompt",
    "vllm.inputs.engine.MultiModalInput": "mm_hashes",
    "vllm.inputs.engine.TokensInput": "prompt_token_ids",
    "vllm.plugins.endpoint_plugins.interface.EndpointPlugin": "name required_tasks",
    "vllm.sampling_params.SamplingParams": "bad_words frequency_penalty presence_penalty repetition_detection "
    "structured_outputs thinking_token_budget",
    "vllm.v1.kv_cache_interface.KVCacheSpec": "block_size page_size_bytes",
    "vllm.v1.worker.gpu_worker.Worker": "check_health",
}
"""Names of vLLM that every supported version has, and that our code uses without naming their owner."""

FLAGS = (
    "additional_config api_server_count async_scheduling block_size data_parallel_backend data_parallel_external_lb "
    "data_parallel_hybrid_lb data_parallel_rank data_parallel_size distributed_executor_backend enable_lora "
    "enable_prefix_caching enable_prompt_embeds enforce_eager grpc headless kv_transfer_config max_model_len "
    "mm_device_do_normalize model model_tag nnodes pipeline_parallel_size runner scheduler_cls served_model_name "
    "speculative_config tensor_parallel_size worker_cls worker_extension_cls"
)
"""Settings of `vllm serve` that we read or set, and that every supported version has."""

CONTRACT = (
    # -- rows in which versions differ
    WEIGHT_SPANS,
    LOGGING_FLAGS,
    SCALE_OUT_FLAG,
    STARTUP,
    RETRYABLE,
    REJECTS_WHILE_PAUSED,
    DEFERRED_WAITING,
    ACTIVE_LIMIT,
    ADOPTS_FOUND,
    RUST_LISTENERS,
    SKIPS_ZEROING,
    Fact("has", SCHEDULER, "skipped_waiting", until="0.30"),
    Fact("has", SPAN, "end", since="0.32"),
    Fact("has", SPAN, "start", since="0.32"),
    Fact("has", SPAN, "version", since="0.32"),
    Fact("has", f"{CORE_CLIENT}.DPLBAsyncMPClient", "call_utility_all_async", since="0.32"),
    Fact("has", "vllm.v1.worker.gpu_worker.Worker", "compute_weight_checksums", since="0.32"),
    Fact("has", "vllm.v1.worker.gpu_worker.Worker", "reset_weights", since="0.32"),
    Fact("has", "vllm.entrypoints.serve.utils.api_utils", "cli_env_setup", until="0.32"),
    Fact("has", "vllm.v1.outputs.AsyncModelRunnerOutput", "get_kv_connector_output", since="0.33"),
    Fact("has", "vllm.v1.engine.EngineCoreOutputs", "weight_version", since="0.32"),
    Fact("has", CORE, "_attach_weight_version", since="0.32"),
    Fact(
        "takes",
        API_PROCESSES,
        "__init__",
        "listen_address= sock= args= num_servers= input_listeners= output_listeners= target_server_fn= "
        "stats_update_address=",
        since="0.32",
    ),
    Fact("flag", SERVE, "log_level", since="0.31"),
    Fact("flag", SERVE, "logging_config", since="0.31"),
    Fact("flag", SERVE, "grpc_port", since="0.32"),
    # For NoTokens: these send the last output of a request without earlier output if its tokens are true.
    Fact("does", CHAT_STREAM, "chat_completion_stream_generator", "and not output.token_ids", until="0.32"),
    Fact("does", CHAT_STREAM, "chat_completion_stream_generator_raw", "and not output.token_ids", since="0.33"),
    # -- rows that cannot be read from our code
    Fact("does", TEXT_STREAM, "completion_stream_generator", "and not delta_token_ids"),
    Fact("adds", CORE, "rollout_call"),
    Fact(
        "replaces",
        "vllm.entrypoints.launchers.api_server.entry.build_async_engine_client_from_engine_args",
        "vllm.v1.engine.async_llm.AsyncLLM",
    ),
    Fact("replaces", f"{CORE_CLIENT}.EngineCoreClient.make_async_mp_client", f"{CORE_CLIENT}.DPLBAsyncMPClient"),
    Fact("replaces", "vllm.v1.engine.utils.launch_core_engines", "vllm.v1.engine.utils.CoreEngineProcManager"),
    Fact(
        "replaces",
        "vllm.entrypoints.cli.serve.run_multi_api_server",
        "vllm.entrypoints.cli.serve.APIServerProcessManager",
    ),
    Fact("replaces", f"{VERIFIER}.apply_sampling_constraints", f"{VERIFIER}.expand_batch_to_tokens"),
    Fact("does", V1_RUNNER, "propose_draft_token_ids", 'spec_config.method == "custom_class"'),
    Fact("takes", "vllm.engine.arg_utils.AsyncEngineArgs", "create_engine_config", "usage_context="),
    Fact("takes", "vllm.entrypoints.openai.models.serving.OpenAIServingModels", "is_base_model", "model_name"),
    Fact("takes", "vllm.entrypoints.openai.models.serving.OpenAIServingModels", "model_name", "lora_request"),
    Fact(
        "takes",
        "vllm.model_executor.models.interfaces_base.VllmModelForTextGeneration",
        "compute_logits",
        "hidden_states",
    ),
    Fact("takes", "vllm.renderers.online_renderer.OnlineRenderer", "render_chat", "request"),
    Fact("takes", "vllm.renderers.online_renderer.OnlineRenderer", "render_completion", "request"),
    Fact("takes", V1_RUNNER, "reload_weights", "weights_path="),
    *(Fact("has", owner, name) for owner, names in ALSO.items() for name in names.split()),
    *(Fact("flag", SERVE, name) for name in FLAGS.split()),
)
"""All rows. Code calls `has(ROW)` with the named ones."""
