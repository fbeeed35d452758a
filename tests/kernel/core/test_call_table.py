"""Rows of the call table and their answers, the kernel's and those of parts."""

from importlib.util import find_spec

from vllm_rollout.kernel.call_table import NAME_CHOICES, Operation
from vllm_rollout.kernel.core.calls import ANSWERS, answered
from vllm_rollout.kernel.parts import faces, load, parts


def test_every_operation_has_one_answer():
    modules = [f"vllm_rollout.parts.{part.name}.calls" for part in parts()]
    tables = [load(module) for module in ["vllm_rollout.kernel.call_table", *filter(find_spec, modules)]]
    rows = {row for table in tables for row in vars(table).values() if isinstance(row, Operation)}
    answers = [row for each in (ANSWERS, *(part.answers for _, part in faces("core"))) for row in each]
    assert len({row.name for row in answers}) == len(answers)
    assert {*answers} == {operation for operation, _ in answered().values()} >= rows - {NAME_CHOICES}
    assert rows >= {*answers}, "a part that scores candidates answers NAME_CHOICES"
