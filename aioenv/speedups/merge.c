/* Columns of float scalars to the info dict of a batch: see batching/merge.py. */

#include "c.h"

enum { MAX_KINDS = 16 };

/* What a `merge._Name` is made of. */
enum { KEY, MASK_KEY, DTYPE, NAME_PARTS };

/* A schema, the names of its columns, and their rows in the table. */
typedef struct {
    PyObject *schema, *names;
    int rows[MAX_KEYS];
} Kind;

/* The rows of the table, each with a name, and the schemas that they are of. */
typedef struct {
    int count, kinds;
    PyObject *names[MAX_KEYS];
    Kind of[MAX_KINDS];
} Merged;

/* Whether a name stands for the same key and dtype as another; 0 if not, -1 if it is the same key of another dtype. */
static int is_same(PyObject *name, PyObject *other) {
    if (PyObject_RichCompareBool(PyTuple_GET_ITEM(name, KEY), PyTuple_GET_ITEM(other, KEY), Py_EQ) != 1)
        return 0;
    int alike = PyObject_RichCompareBool(PyTuple_GET_ITEM(name, DTYPE), PyTuple_GET_ITEM(other, DTYPE), Py_EQ);
    return alike == 1 ? 1 : -1;
}

/* The row of a name, which may be a new one; -1 if it has none. */
static int row_of(Merged *merged, PyObject *name) {
    if (!is_tuple_of(name, NAME_PARTS) || !PyUnicode_CheckExact(PyTuple_GET_ITEM(name, KEY)) ||
        !PyUnicode_CheckExact(PyTuple_GET_ITEM(name, MASK_KEY)))
        return -1;
    for (int row = 0; row < merged->count; row++) {
        int same = is_same(name, merged->names[row]);
        if (same)
            return same > 0 ? row : -1;
    }
    if (merged->count == MAX_KEYS)
        return -1;
    merged->names[merged->count] = name;
    return merged->count++;
}

/* What is known of a part's schema; NULL if Python has not named its columns yet, or they are not for the table. */
static const Kind *kind_of(Merged *merged, PyObject *part, PyObject *named) {
    if (!is_tuple_of(part, COLUMNS_PARTS))
        return NULL;
    PyObject *schema = PyTuple_GET_ITEM(part, SCHEMA);
    for (int i = 0; i < merged->kinds; i++)
        if (merged->of[i].schema == schema)
            return &merged->of[i];
    if (!is_of_floats(schema) || merged->kinds == MAX_KINDS)
        return NULL;
    PyObject *id = PyLong_FromVoidPtr(schema), *known = id == NULL ? NULL : PyDict_GetItemWithError(named, id);
    Py_XDECREF(id);
    if (known == NULL || !is_tuple_of(known, 2) || PyTuple_GET_ITEM(known, 0) != schema ||
        !PyTuple_CheckExact(PyTuple_GET_ITEM(known, 1)) || PyTuple_GET_SIZE(PyTuple_GET_ITEM(known, 1)) > MAX_KEYS)
        return NULL;
    Kind *kind = &merged->of[merged->kinds++];
    kind->schema = schema;
    kind->names = Py_NewRef(PyTuple_GET_ITEM(known, 1));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kind->names); i++)
        if ((kind->rows[i] = row_of(merged, PyTuple_GET_ITEM(kind->names, i))) < 0)
            return NULL;
    return kind;
}

/* How many rows a part has: from `start` on, or where `at` says, if it has memory; < 0 if some are not of `size`. */
static Py_ssize_t find_rows(PyObject *positions, Py_ssize_t size, Py_ssize_t *start, Py_buffer *at) {
    Py_ssize_t stop, step, count;
    if (PySlice_Check(positions)) {
        if (PySlice_Unpack(positions, start, &stop, &step) < 0) {
            PyErr_Clear();
            return -1;
        }
        return step == 1 && *start >= 0 && stop >= *start && stop <= size ? stop - *start : -1;
    }
    if (!view_numbers(positions, 1, "lq", at))
        return -1;
    count = at->shape[0];
    for (Py_ssize_t i = 0; i < count; i++)
        if (number_in(at, i) < 0 || number_in(at, i) >= size)
            return -1;
    return count;
}

/* Puts a part's values into the table; 0 if they do not fit. */
static int put_part(PyObject *part, const Kind *kind, Py_ssize_t size, double *table, char *masks) {
    Py_buffer at = {.buf = NULL, .obj = NULL}, values;
    Py_ssize_t start = 0, keys = PyTuple_GET_SIZE(kind->names);
    Py_ssize_t count = find_rows(PyTuple_GET_ITEM(part, POSITIONS), size, &start, &at);
    int fits = 0;
    if (view_numbers(PyTuple_GET_ITEM(part, VALUES), 2, "d", &values)) {
        fits = values.shape[0] == keys && values.shape[1] == count;
        const char *from = values.buf; /* of numbers that may not be aligned */
        for (Py_ssize_t key = 0; fits && key < keys; key++) {
            double *to = table + kind->rows[key] * size;
            char *mask = masks + kind->rows[key] * size;
            if (at.obj == NULL) {
                memcpy(to + start, from, (size_t)count * sizeof *to);
                memset(mask + start, 1, (size_t)count);
                from += count * (Py_ssize_t)sizeof *to;
                continue;
            }
            for (Py_ssize_t i = 0; i < count; i++, from += sizeof *to) {
                memcpy(to + number_in(&at, i), from, sizeof *to);
                mask[number_in(&at, i)] = 1;
            }
        }
        PyBuffer_Release(&values);
    }
    PyBuffer_Release(&at);
    return fits;
}

/* Puts a row of the table, and of its masks, under the keys of their name. */
static int put_row(PyObject *infos, PyObject *name, PyObject *table, PyObject *masks, Py_ssize_t row) {
    PyObject *values = PySequence_GetItem(table, row), *mask = PySequence_GetItem(masks, row);
    PyObject *dtype = PyTuple_GET_ITEM(name, DTYPE);
    if (values != NULL && mask != NULL && dtype != Py_None)
        Py_SETREF(values, PyObject_CallMethodOneArg(values, str_astype, dtype));
    int failed = values == NULL || mask == NULL ||
                 PyDict_SetItem(infos, PyTuple_GET_ITEM(name, KEY), values) < 0 ||
                 PyDict_SetItem(infos, PyTuple_GET_ITEM(name, MASK_KEY), mask) < 0;
    Py_XDECREF(values);
    Py_XDECREF(mask);
    return failed ? -1 : 0;
}

/* The info dict; NULL if parts do not fit, or with an exception. */
static PyObject *merge_all(PyObject *parts, Merged *merged, Py_ssize_t size, PyObject *named) {
    Py_buffer values = {.obj = NULL}, flags = {.obj = NULL};
    Py_ssize_t keys = merged->count;
    PyObject *table = zeros(Py_BuildValue("(nn)", keys, size), float64_dtype, &values), *infos = NULL;
    PyObject *masks = table == NULL ? NULL : zeros(Py_BuildValue("(nn)", keys, size), bool_dtype, &flags);
    int fits = masks != NULL;
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(parts); i++) {
        PyObject *part = PyTuple_GET_ITEM(parts, i);
        fits = put_part(part, kind_of(merged, part, named), size, values.buf, flags.buf);
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&flags);
    if (fits)
        infos = PyDict_New();
    for (int row = 0; infos != NULL && row < keys; row++)
        if (put_row(infos, merged->names[row], table, masks, row) < 0)
            Py_CLEAR(infos);
    Py_XDECREF(table);
    Py_XDECREF(masks);
    return infos;
}

PyObject *merge_floats(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 3 || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "merge_floats: expected parts, a size, and a dict of names");
        return NULL;
    }
    uint32_t size;
    if ((!PyList_CheckExact(args[0]) && !PyTuple_CheckExact(args[0])) || as_word(args[1], &size))
        Py_RETURN_NONE;
    PyObject *parts = PySequence_Tuple(args[0]), *infos = NULL; /* which nobody changes meanwhile */
    if (parts == NULL)
        return NULL;
    Merged merged;
    merged.count = merged.kinds = 0;
    Py_ssize_t known = 0, count = PyTuple_GET_SIZE(parts);
    while (known < count && kind_of(&merged, PyTuple_GET_ITEM(parts, known), args[2]) != NULL)
        known++;
    if (known < count)
        PyErr_Clear();
    else if (count)
        infos = merge_all(parts, &merged, size, args[2]);
    while (merged.kinds)
        Py_DECREF(merged.of[--merged.kinds].names);
    Py_DECREF(parts);
    return infos != NULL || PyErr_Occurred() ? infos : Py_NewRef(Py_None);
}
