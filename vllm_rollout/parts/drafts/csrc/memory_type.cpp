// DraftMemory as a type of Python's limited API: torch's stable ABI has
// operators but no classes. Arrays come as bytes, of which the limited API of
// Python 3.10 can see the inside; vllm_rollout/parts/drafts/worker/memory.py
// checks shapes and types before they come here. The interpreter's lock is held
// throughout, so that a memory is used by one thread at a time.
#include "registration.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "memory.h"

namespace vllm_rollout {
namespace {

struct Object {
  PyObject ob_base;
  DraftMemory* memory;
};

DraftMemory& memory_of(PyObject* self) {
  return *reinterpret_cast<Object*>(self)->memory;
}

// Runs what may throw; nullptr with Python's error set when it did.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <typename T>
struct Values {
  const T* data = nullptr;
  int64_t count = 0;
};

// What is inside bytes; false with Python's error set when it is not bytes.
template <typename T>
bool values_of(PyObject* bytes, Values<T>* values) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes, &data, &size) < 0) return false;
  *values = {reinterpret_cast<const T*>(data),
             static_cast<int64_t>(size / static_cast<Py_ssize_t>(sizeof(T)))};
  return true;
}

PyObject* bytes_of(const std::vector<int32_t>& tokens) {
  return PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(tokens.data()),
      static_cast<Py_ssize_t>(tokens.size() * sizeof(int32_t)));
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  long long max_bytes, min_match, max_match, max_places;
  if (!PyArg_ParseTuple(arguments, "LLLL", &max_bytes, &min_match, &max_match,
                        &max_places))
    return nullptr;
  const auto allocate =
      reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* self = allocate(type, 0);
  if (self == nullptr) return nullptr;
  PyObject* created = guarded([&] {
    reinterpret_cast<Object*>(self)->memory =
        new DraftMemory(max_bytes, min_match, max_match, max_places);
    return self;
  });
  if (created == nullptr) Py_DECREF(self);
  return created;
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->memory;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyObject* begin(PyObject* self, PyObject* arguments) {
  PyObject *key, *context;
  Values<char> text;
  Values<int32_t> tokens;
  if (!PyArg_ParseTuple(arguments, "SS", &key, &context) ||
      !values_of(key, &text) || !values_of(context, &tokens))
    return nullptr;
  return guarded([&] {
    return PyLong_FromLongLong(
        memory_of(self).begin({text.data, static_cast<size_t>(text.count)},
                              tokens.data, tokens.count));
  });
}

PyObject* step(PyObject* self, PyObject* arguments) {
  PyObject *sequence_bytes, *token_bytes, *longest_bytes;
  Values<int64_t> sequences;
  Values<int32_t> tokens, longest;
  if (!PyArg_ParseTuple(arguments, "SSS", &sequence_bytes, &token_bytes,
                        &longest_bytes) ||
      !values_of(sequence_bytes, &sequences) ||
      !values_of(token_bytes, &tokens) || !values_of(longest_bytes, &longest))
    return nullptr;
  const int64_t num_rows = sequences.count;
  if (longest.count != num_rows ||
      (num_rows > 0 ? tokens.count % num_rows : tokens.count) != 0) {
    PyErr_SetString(PyExc_ValueError,
                    "sequences, tokens and longest must have as many rows");
    return nullptr;
  }
  int64_t num_columns = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (longest.data[row] < 0) {
      PyErr_Format(PyExc_ValueError,
                   "longest[%zd] must not be negative, got %d",
                   static_cast<Py_ssize_t>(row), longest.data[row]);
      return nullptr;
    }
    num_columns = std::max<int64_t>(num_columns, longest.data[row]);
  }
  const Py_ssize_t size = static_cast<Py_ssize_t>(num_rows * num_columns * 4);
  PyObject* drafts = PyByteArray_FromStringAndSize(nullptr, size);
  PyObject* probabilities = PyByteArray_FromStringAndSize(nullptr, size);
  PyObject* result = nullptr;
  if (drafts != nullptr && probabilities != nullptr) {
    result = guarded([&] {
      memory_of(self).step(
          num_rows, sequences.data, num_rows > 0 ? tokens.count / num_rows : 0,
          tokens.data, longest.data, num_columns,
          reinterpret_cast<int32_t*>(PyByteArray_AsString(drafts)),
          reinterpret_cast<float*>(PyByteArray_AsString(probabilities)));
      return PyTuple_Pack(2, drafts, probabilities);
    });
  }
  Py_XDECREF(drafts);
  Py_XDECREF(probabilities);
  return result;
}

PyObject* end(PyObject* self, PyObject* arguments) {
  PyObject* sequence_bytes;
  Values<int64_t> sequences;
  int keep;
  if (!PyArg_ParseTuple(arguments, "Sp", &sequence_bytes, &keep) ||
      !values_of(sequence_bytes, &sequences))
    return nullptr;
  return guarded([&] {
    memory_of(self).end(sequences.count, sequences.data, keep != 0);
    return Py_NewRef(Py_None);
  });
}

PyObject* age(PyObject* self, PyObject*) {
  memory_of(self).age();
  return Py_NewRef(Py_None);
}

// Appends and gives up its reference; false with Python's error set.
bool append(PyObject* list, PyObject* item) {
  if (item == nullptr) return false;
  const int failed = PyList_Append(list, item);
  Py_DECREF(item);
  return failed == 0;
}

PyObject* sequences_of(const KeptPrompt& prompt) {
  PyObject* list = PyList_New(0);
  if (list == nullptr) return nullptr;
  for (const KeptSequence& sequence : prompt.sequences) {
    // "N" takes the reference, and gives nullptr when there is none.
    if (!append(list,
                Py_BuildValue("(LLN)", static_cast<long long>(sequence.branch),
                              static_cast<long long>(sequence.versions_old),
                              bytes_of(sequence.tokens)))) {
      Py_DECREF(list);
      return nullptr;
    }
  }
  return list;
}

PyObject* kept(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const std::vector<KeptPrompt> prompts = memory_of(self).kept();
    PyObject* list = PyList_New(0);
    if (list == nullptr) return nullptr;
    for (const KeptPrompt& prompt : prompts) {
      if (!append(list,
                  Py_BuildValue("(NNN)",
                                PyBytes_FromStringAndSize(
                                    prompt.key.data(),
                                    static_cast<Py_ssize_t>(prompt.key.size())),
                                bytes_of(prompt.stem), sequences_of(prompt)))) {
        Py_DECREF(list);
        return nullptr;
      }
    }
    return list;
  });
}

PyObject* restore(PyObject* self, PyObject* arguments) {
  PyObject *key, *stem, *sequences;
  Values<char> text;
  Values<int32_t> tokens;
  if (!PyArg_ParseTuple(arguments, "SSO", &key, &stem, &sequences) ||
      !values_of(key, &text) || !values_of(stem, &tokens))
    return nullptr;
  const Py_ssize_t count = PyList_Size(sequences);
  if (count < 0) return nullptr;
  return guarded([&]() -> PyObject* {
    KeptPrompt prompt{{text.data, static_cast<size_t>(text.count)},
                      {tokens.data, tokens.data + tokens.count},
                      {}};
    for (Py_ssize_t i = 0; i < count; ++i) {
      long long branch, versions_old;
      PyObject* own;
      Values<int32_t> values;
      if (!PyArg_ParseTuple(PyList_GetItem(sequences, i), "LLS", &branch,
                            &versions_old, &own) ||
          !values_of(own, &values))
        return nullptr;
      if (branch < 0 || branch > tokens.count)
        throw std::invalid_argument("a sequence branches beyond the stem");
      prompt.sequences.push_back(
          {branch, versions_old, {values.data, values.data + values.count}});
    }
    memory_of(self).restore(prompt);
    return Py_NewRef(Py_None);
  });
}

PyObject* num_bytes(PyObject* self, void*) {
  return PyLong_FromLongLong(memory_of(self).num_bytes());
}

PyObject* num_prompts(PyObject* self, void*) {
  return PyLong_FromLongLong(memory_of(self).num_prompts());
}

// False with Python's error set.
bool add_draft_memory_type(PyObject* module) {
  static PyMethodDef methods[] = {
      {"begin", begin, METH_VARARGS, nullptr},
      {"step", step, METH_VARARGS, nullptr},
      {"end", end, METH_VARARGS, nullptr},
      {"age", age, METH_NOARGS, nullptr},
      {"kept", kept, METH_NOARGS, nullptr},
      {"restore", restore, METH_VARARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef properties[] = {
      {"num_bytes", num_bytes, nullptr, nullptr, nullptr},
      {"num_prompts", num_prompts, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(create)},
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
      {Py_tp_methods, methods},
      {Py_tp_getset, properties},
      {0, nullptr},
  };
  static PyType_Spec spec{"vllm_rollout._C.DraftMemory", sizeof(Object), 0,
                          Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) return false;
  const int failed = PyModule_AddObjectRef(module, "DraftMemory", type);
  Py_DECREF(type);
  return failed == 0;
}

const AddedTypes added(add_draft_memory_type);

}  // namespace
}  // namespace vllm_rollout
