// Makes a shared library of operators importable: `import vllm_rollout._C`
// loads it, and its static initialisers register the operators. Types of
// Python, which have a state and no tensors, are added by `AddedTypes`.
#pragma once

#include <Python.h>

#define VLLM_ROLLOUT_CONCAT_(a, b) a##b
#define VLLM_ROLLOUT_CONCAT(a, b) VLLM_ROLLOUT_CONCAT_(a, b)
#define VLLM_ROLLOUT_STRINGIFY_(a) #a
#define VLLM_ROLLOUT_STRINGIFY(a) VLLM_ROLLOUT_STRINGIFY_(a)

namespace vllm_rollout {

// Types that a file adds to the module. Each file that has some defines one
// static object, so that no other file names its types.
class AddedTypes {
 public:
  // `add` returns false with Python's error set.
  explicit AddedTypes(bool (*add)(PyObject* module))
      : add_(add), next_(first()) {
    first() = this;
  }

  static bool add_all(PyObject* module) {
    for (const AddedTypes* each = first(); each; each = each->next_)
      if (!each->add_(module)) return false;
    return true;
  }

 private:
  static const AddedTypes*& first() {
    static const AddedTypes* first = nullptr;
    return first;
  }

  bool (*add_)(PyObject*);
  const AddedTypes* next_;
};

}  // namespace vllm_rollout

#define VLLM_ROLLOUT_PYTHON_MODULE(name)                                     \
  PyMODINIT_FUNC VLLM_ROLLOUT_CONCAT(PyInit_, name)() {                      \
    static PyModuleDef module{};                                             \
    module.m_base = PyModuleDef_HEAD_INIT;                                   \
    module.m_name = VLLM_ROLLOUT_STRINGIFY(name);                            \
    PyObject* created = PyModule_Create(&module);                            \
    if (created != nullptr && !vllm_rollout::AddedTypes::add_all(created)) { \
      Py_DECREF(created);                                                    \
      return nullptr;                                                        \
    }                                                                        \
    return created;                                                          \
  }
