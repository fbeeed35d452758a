"""A tool of verl, named by `rollout.multi_turn.function_tool_path`."""

from verl.tools.function_tool import function_tool

from conformance.calculator import calculate

function_tool(calculate)
