# vllm-rollout on vLLM's own image for NVIDIA GPUs. It takes the wheel of `make wheel` out of dist/:
#   make wheel && docker build --tag vllm-rollout .
#   docker run --gpus all --ipc host --publish 127.0.0.1:8000:8000 vllm-rollout MODEL
ARG VLLM_VERSION=0.32.0
FROM vllm/vllm-openai:v${VLLM_VERSION}

# The extra [rewards] only: vLLM and torch stay as the image has them.
RUN --mount=type=bind,source=dist,target=/dist \
    for wheel in /dist/vllm_rollout-*.whl; do uv pip install --system --no-cache "${wheel}[rewards]"; done

ENTRYPOINT ["vllm-rollout", "serve"]
