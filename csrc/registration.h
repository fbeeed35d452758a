// Makes a shared library of operators importable: `import vllm_rollout._C`
// loads it, and its static initialisers register the operators.
#pragma once

#include <Python.h>

#define VLLM_ROLLOUT_CONCAT_(a, b) a##b
#define VLLM_ROLLOUT_CONCAT(a, b) VLLM_ROLLOUT_CONCAT_(a, b)
#define VLLM_ROLLOUT_STRINGIFY_(a) #a
#define VLLM_ROLLOUT_STRINGIFY(a) VLLM_ROLLOUT_STRINGIFY_(a)

#define VLLM_ROLLOUT_PYTHON_MODULE(name)                \
  PyMODINIT_FUNC VLLM_ROLLOUT_CONCAT(PyInit_, name)() { \
    static PyModuleDef module{};                        \
    module.m_base = PyModuleDef_HEAD_INIT;              \
    module.m_name = VLLM_ROLLOUT_STRINGIFY(name);       \
    return PyModule_Create(&module);                    \
  }
