/* The module that the others make, and what they look up in Python. */

#include "c.h"

PyObject *zlib_crc32, *numpy_array, *numpy_zeros, *numpy_scalar, *numpy_bool, *numpy_integer, *numpy_floating;
PyObject *float64_dtype, *int64_dtype, *bool_dtype, *tuple_new;

#define DEFINE(name) PyObject *str_##name;
NAMES(DEFINE)

PyObject *hold(Held *held, PyObject *object) {
    if (object == NULL)
        return NULL;
    if (held->count == MAX_HELD) {
        Py_DECREF(object);
        PyErr_SetString(PyExc_SystemError, "aioenv.speedups: more references than there is room for");
        return NULL;
    }
    return held->objects[held->count++] = object;
}

PyObject *look_up(Held *held, PyObject *of, PyObject *name) {
    return hold(held, of == NULL || PyErr_Occurred() ? NULL : PyObject_GetAttr(of, name));
}

void let_go(Held *held) {
    while (held->count)
        Py_DECREF(held->objects[--held->count]);
}

int as_word(PyObject *object, uint32_t *number) {
    unsigned long long value = object && PyLong_Check(object) ? PyLong_AsUnsignedLongLong(object) : ~0ULL;
    if (PyErr_Occurred())
        PyErr_Clear();
    *number = (uint32_t)value;
    return value > UINT32_MAX ? -1 : 0;
}

int set_word(PyObject *of, PyObject *name, uint32_t number) {
    PyObject *value = PyLong_FromUnsignedLong(number);
    int failed = value == NULL ? -1 : PyObject_SetAttr(of, name, value);
    Py_XDECREF(value);
    return failed;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    {"crc32", (PyCFunction)(void (*)(void))crc_of, METH_FASTCALL, NULL},
    FAST(write_frame),
    FAST(read_frame),
    FAST(spin),
    FAST(step_rows),
    FAST(serve_express),
    FAST(send_express),
    FAST(read_columns),
    FAST(merge_columns),
    FAST(within),
    {"take_express", take_express, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *attribute_of(const char *module, const char *name) {
    PyObject *imported = PyImport_ImportModule(module);
    if (imported == NULL)
        return NULL;
    PyObject *value = PyObject_GetAttrString(imported, name);
    Py_DECREF(imported);
    return value;
}

static PyObject *dtype_of(const char *name) {
    PyObject *type = attribute_of("numpy", "dtype");
    PyObject *dtype = type == NULL ? NULL : PyObject_CallFunction(type, "s", name);
    Py_XDECREF(type);
    return dtype;
}

/* What is looked up elsewhere. */
static const struct {
    PyObject **place;
    const char *module, *name; /* no module: a dtype of numpy's */
} looked_up[] = {
    {&zlib_crc32, "zlib", "crc32"},         {&numpy_array, "numpy", "ndarray"},
    {&numpy_zeros, "numpy", "zeros"},       {&numpy_scalar, "numpy", "generic"},
    {&numpy_bool, "numpy", "bool_"},        {&numpy_integer, "numpy", "integer"},
    {&numpy_floating, "numpy", "floating"}, {&float64_dtype, NULL, "float64"},
    {&int64_dtype, NULL, "int64"},          {&bool_dtype, NULL, "bool"},
};
enum { LOOKED_UP = sizeof looked_up / sizeof *looked_up };

/* Takes the place of the clock that MuJoCo's profiler reads (see mujoco_clock.py). */
static double stand_still(void) { return 0; }

static int set_up(PyObject *module) {
#define INTERN(name)                                                                                                   \
    if (str_##name == NULL && (str_##name = PyUnicode_InternFromString(#name)) == NULL)                                \
        return -1;
    NAMES(INTERN)
    if (!set_up_crc() && PyObject_SetAttrString(module, "crc32", Py_None) < 0)
        return -1;
    PyObject *clock = PyLong_FromVoidPtr((void *)stand_still);
    int added = clock == NULL ? -1 : PyModule_AddObjectRef(module, "stopped_clock", clock);
    Py_XDECREF(clock);
    if (added < 0)
        return -1;
    /* All or nothing: a second import, which numpy may refuse, leaves the first what that works with. */
    PyObject *found[LOOKED_UP + 1] = {PyObject_GetAttrString((PyObject *)&PyTuple_Type, "__new__")};
    int count = found[0] != NULL;
    for (int i = 0; count == i + 1 && i < LOOKED_UP; i++) {
        const char *from = looked_up[i].module, *name = looked_up[i].name;
        found[count] = from == NULL ? dtype_of(name) : attribute_of(from, name);
        count += found[count] != NULL;
    }
    if (count <= LOOKED_UP) {
        while (count)
            Py_DECREF(found[--count]);
        return -1;
    }
    Py_XSETREF(tuple_new, found[0]);
    for (int i = 0; i < LOOKED_UP; i++)
        Py_XSETREF(*looked_up[i].place, found[i + 1]);
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, set_up},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* they would share what was looked up */
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "aioenv.speedups._c",
    .m_doc = "The path of a plain step in C (see _c.pyi).",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__c(void) { return PyModuleDef_Init(&definition); }
