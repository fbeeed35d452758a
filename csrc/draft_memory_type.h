// DraftMemory as a type of Python.
#pragma once

#include <Python.h>

namespace vllm_rollout {

// Adds `DraftMemory` to the module; false with Python's error set.
bool add_draft_memory_type(PyObject* module);

}  // namespace vllm_rollout
