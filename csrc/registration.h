// Makes a shared library of operators importable: `import vllm_rollout._C`
// loads it, and its static initialisers register the operators. What is not an
// operator, because it has a state and no tensors, `add_types(module)` adds.
#pragma once

#include <Python.h>

#define VLLM_ROLLOUT_CONCAT_(a, b) a##b
#define VLLM_ROLLOUT_CONCAT(a, b) VLLM_ROLLOUT_CONCAT_(a, b)
#define VLLM_ROLLOUT_STRINGIFY_(a) #a
#define VLLM_ROLLOUT_STRINGIFY(a) VLLM_ROLLOUT_STRINGIFY_(a)

#define VLLM_ROLLOUT_PYTHON_MODULE(name, add_types)     \
  PyMODINIT_FUNC VLLM_ROLLOUT_CONCAT(PyInit_, name)() { \
    static PyModuleDef module{};                        \
    module.m_base = PyModuleDef_HEAD_INIT;              \
    module.m_name = VLLM_ROLLOUT_STRINGIFY(name);       \
    PyObject* created = PyModule_Create(&module);       \
    if (created != nullptr && !add_types(created)) {    \
      Py_DECREF(created);                               \
      return nullptr;                                   \
    }                                                   \
    return created;                                     \
  }
