/* Define the module, and look up the Python objects that the other files use. */

#include "c.h"

PyObject *zlib_crc32, *numpy_array, *numpy_zeros, *numpy_scalar, *numpy_bool, *numpy_integer, *numpy_floating;
PyObject *float64_dtype, *int64_dtype, *bool_dtype, *tuple_new;

#define DEFINE(name) PyObject *str_##name;
NAMES(DEFINE)

PyObject *add_reference(References *refs, PyObject *object) {
    if (object == NULL)
        return NULL;
    if (refs->count == MAX_REFERENCES) {
        Py_DECREF(object);
        PyErr_SetString(PyExc_SystemError, "aioenv.speedups: too many references");
        return NULL;
    }
    return refs->objects[refs->count++] = object;
}

PyObject *look_up(References *refs, PyObject *object, PyObject *name) {
    return add_reference(refs, object == NULL || PyErr_Occurred() ? NULL : PyObject_GetAttr(object, name));
}

void release_references(References *refs) {
    while (refs->count)
        Py_DECREF(refs->objects[--refs->count]);
}

int as_uint32(PyObject *object, uint32_t *number) {
    unsigned long long value = object && PyLong_Check(object) ? PyLong_AsUnsignedLongLong(object) : ~0ULL;
    if (PyErr_Occurred())
        PyErr_Clear();
    *number = (uint32_t)value;
    return value > UINT32_MAX ? -1 : 0;
}

int set_uint32(PyObject *object, PyObject *name, uint32_t number) {
    PyObject *value = PyLong_FromUnsignedLong(number);
    int failed = value == NULL ? -1 : PyObject_SetAttr(object, name, value);
    Py_XDECREF(value);
    return failed;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    {"crc32", (PyCFunction)(void (*)(void))crc32_of, METH_FASTCALL, NULL},
    FAST(write_frame),
    FAST(read_frame),
    FAST(spin),
    FAST(step_rows),
    FAST(serve_steps),
    FAST(step_here),
    FAST(send_steps),
    FAST(read_columns),
    FAST(merge_columns),
    FAST(within),
    FAST(step_below),
    {"take_replies", take_replies, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *import_attribute(const char *module, const char *name) {
    PyObject *imported = PyImport_ImportModule(module);
    if (imported == NULL)
        return NULL;
    PyObject *value = PyObject_GetAttrString(imported, name);
    Py_DECREF(imported);
    return value;
}

static PyObject *make_dtype(const char *name) {
    PyObject *type = import_attribute("numpy", "dtype");
    PyObject *dtype = type == NULL ? NULL : PyObject_CallFunction(type, "s", name);
    Py_XDECREF(type);
    return dtype;
}

/* Objects of other modules. */
static const struct {
    PyObject **place;
    const char *module, *name; /* NULL: a numpy dtype */
} imported_objects[] = {
    {&zlib_crc32, "zlib", "crc32"},         {&numpy_array, "numpy", "ndarray"},
    {&numpy_zeros, "numpy", "zeros"},       {&numpy_scalar, "numpy", "generic"},
    {&numpy_bool, "numpy", "bool_"},        {&numpy_integer, "numpy", "integer"},
    {&numpy_floating, "numpy", "floating"}, {&float64_dtype, NULL, "float64"},
    {&int64_dtype, NULL, "int64"},          {&bool_dtype, NULL, "bool"},
};
enum { IMPORTED_OBJECTS = sizeof imported_objects / sizeof *imported_objects };

/* Replaces the clock of MuJoCo's profiler (see mujoco_versions.py). */
static double stopped_clock(void) { return 0; }

static int check_array_fields_of_sample(void) {
    PyObject *array = PyObject_CallFunction(numpy_zeros, "((ii))", 3, 2);
    PyObject *transposed = array == NULL ? NULL : PyObject_GetAttrString(array, "T");
    int failed = transposed == NULL ? -1 : check_array_fields(transposed);
    Py_XDECREF(array);
    Py_XDECREF(transposed);
    return failed;
}

static int set_up(PyObject *module) {
#define INTERN(name)                                                                                                   \
    if (str_##name == NULL && (str_##name = PyUnicode_InternFromString(#name)) == NULL)                                \
        return -1;
    NAMES(INTERN)
    if (!set_up_crc() && PyObject_SetAttrString(module, "crc32", Py_None) < 0)
        return -1;
    PyObject *clock = PyLong_FromVoidPtr((void *)stopped_clock);
    int added = clock == NULL ? -1 : PyModule_AddObjectRef(module, "stopped_clock", clock);
    Py_XDECREF(clock);
    if (added < 0)
        return -1;
    /* All or nothing: if a second import fails, because numpy may refuse it, the objects of the first stay in place. */
    PyObject *found[IMPORTED_OBJECTS + 1] = {PyObject_GetAttrString((PyObject *)&PyTuple_Type, "__new__")};
    int count = found[0] != NULL;
    for (int i = 0; count == i + 1 && i < IMPORTED_OBJECTS; i++) {
        const char *from = imported_objects[i].module, *name = imported_objects[i].name;
        found[count] = from == NULL ? make_dtype(name) : import_attribute(from, name);
        count += found[count] != NULL;
    }
    if (count <= IMPORTED_OBJECTS) {
        while (count)
            Py_DECREF(found[--count]);
        return -1;
    }
    Py_XSETREF(tuple_new, found[0]);
    for (int i = 0; i < IMPORTED_OBJECTS; i++)
        Py_XSETREF(*imported_objects[i].place, found[i + 1]);
    return check_array_fields_of_sample();
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, set_up},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* the objects looked up are global */
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "aioenv.speedups._c",
    .m_doc = "The fast path of a plain step in C (see _c.pyi).",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__c(void) { return PyModuleDef_Init(&definition); }
