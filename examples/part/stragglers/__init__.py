"""A part in a package of its own: it stops candidates that are much longer than their ended siblings.

    pip install --no-deps examples/part
    vllm-rollout serve MODEL
    curl http://127.0.0.1:8000/v1/rollouts -H 'content-type: application/json' -d '{
        "prompts": [{"prompt": "17 + 25 ="}], "group_size": 4, "redundancy": 4, "straggler_factor": 2}'

The field has its check, its error and its description in bodies and in `vllm_xargs`. Our clients take it where this
package is installed. docs/contributing/architecture.md has the other ports.
"""

from __future__ import annotations

from vllm_rollout.kernel.parts import Part

PART = Part(
    "stragglers",
    "Stops candidates that are much longer than their ended siblings.",
    faces={
        "fields": "stragglers.http:StragglerBody",
        "step": "stragglers.rules:StragglerStep",
        "terms": "stragglers.rules:StragglerRequests",
        "wire": "stragglers.rules:ON_THE_WIRE",
    },
)
