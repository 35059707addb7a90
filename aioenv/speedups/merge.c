/* Columns that have a dtype to the info dict of a batch: see spaces/infos.py. */

#include "c.h"

enum { MAX_KINDS = 16 };

/* What a `merge._Name` is made of. */


/* A schema, the names of its columns, and their numbers among all keys. */
typedef struct {
    PyObject *schema, *names;
    int rows[MAX_KEYS];
} Kind;

/* The keys, each with a name, and the schemas that they are of. */
typedef struct {
    int count, kinds;
    PyObject *names[MAX_KEYS];
    Kind of[MAX_KINDS];
} Merged;

/* Whether a name stands for the same key, dtype and shape as another; 0 if not, -1 if it is the same key of others. */
static int is_same(PyObject *name, PyObject *other) {
    if (PyObject_RichCompareBool(PyTuple_GET_ITEM(name, NAME_KEY), PyTuple_GET_ITEM(other, NAME_KEY), Py_EQ) != 1)
        return 0;
    for (int part = NAME_DTYPE; part <= NAME_SHAPE; part++) {
        PyObject *one = PyTuple_GET_ITEM(name, part), *two = PyTuple_GET_ITEM(other, part);
        if (one != two && (one == Py_None || two == Py_None || PyObject_RichCompareBool(one, two, Py_EQ) != 1))
            return -1; /* numpy takes None for a dtype */
    }
    return 1;
}

/* The number of a name, which may be a new one; -1 if it has none. */
static int row_of(Merged *merged, PyObject *name) {
    if (!is_tuple_of(name, NAME_FIELDS) || !PyUnicode_CheckExact(PyTuple_GET_ITEM(name, NAME_KEY)) ||
        !PyUnicode_CheckExact(PyTuple_GET_ITEM(name, NAME_MASK_KEY)) || !PyTuple_CheckExact(PyTuple_GET_ITEM(name, NAME_SHAPE)))
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

/* What is known of a part's schema; NULL if Python has not named its columns. */
static const Kind *kind_of(Merged *merged, PyObject *part, PyObject *named) {
    if (!is_tuple_of(part, COLUMNS_FIELDS))
        return NULL;
    PyObject *schema = PyTuple_GET_ITEM(part, COLUMNS_SCHEMA);
    for (int i = 0; i < merged->kinds; i++)
        if (merged->of[i].schema == schema)
            return &merged->of[i];
    if (!is_schema(schema) || merged->kinds == MAX_KINDS)
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

/* Where the values of a key go. */
typedef struct {
    PyObject *array; /* NULL: a row of the table */
    Py_buffer view;
    char *values, *mask;
    Py_ssize_t bytes; /* of a row of the batch */
    int narrow;       /* whether values of a table, which are float64, do not fit */
} Target;

/* Puts a part's values of one key where they go. */
static void put_values(const Target *target, const char *from, Py_ssize_t start, const Py_buffer *at, Py_ssize_t count) {
    size_t bytes = (size_t)target->bytes;
    if (at->obj == NULL) {
        memcpy(target->values + (size_t)start * bytes, from, (size_t)count * bytes);
        memset(target->mask + start, 1, (size_t)count);
        return;
    }
    for (Py_ssize_t i = 0; i < count; i++, from += bytes) {
        memcpy(target->values + (size_t)number_in(at, i) * bytes, from, bytes);
        target->mask[number_in(at, i)] = 1;
    }
}

/* Puts the rows of a table where they go; 0 if they do not fit. */
static int put_table(PyObject *table, const Kind *kind, Py_ssize_t start, const Py_buffer *at, Py_ssize_t count,
                     const Target *targets) {
    Py_buffer view;
    if (!view_numbers(table, 2, "d", &view))
        return 0;
    Py_ssize_t keys = PyTuple_GET_SIZE(kind->names);
    int fits = view.shape[0] == keys && view.shape[1] == count;
    for (Py_ssize_t key = 0; fits && key < keys; key++) {
        const Target *target = &targets[kind->rows[key]];
        fits = target->bytes == 8 && !target->narrow;
        if (fits)
            put_values(target, (const char *)view.buf + 8 * key * count, start, at, count);
    }
    PyBuffer_Release(&view);
    return fits;
}

/* Likewise of a list of arrays. */
static int put_arrays(PyObject *arrays, const Kind *kind, Py_ssize_t start, const Py_buffer *at, Py_ssize_t count,
                      const Target *targets) {
    Py_ssize_t keys = PyTuple_GET_SIZE(kind->names);
    int fits = PyList_CheckExact(arrays) && PyList_GET_SIZE(arrays) == keys;
    for (Py_ssize_t key = 0; fits && key < keys; key++) {
        const Target *target = &targets[kind->rows[key]];
        PyObject *array = PyList_GET_ITEM(arrays, key);
        Py_buffer view;
        fits = Py_TYPE(array) == (PyTypeObject *)numpy_array &&
               PyObject_GetBuffer(array, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0;
        if (!fits)
            break;
        fits = view.ndim && view.shape[0] == count && view.len == count * target->bytes;
        if (fits)
            put_values(target, view.buf, start, at, count);
        PyBuffer_Release(&view);
    }
    PyErr_Clear();
    return fits;
}

static int put_part(PyObject *part, const Kind *kind, Py_ssize_t size, const Target *targets) {
    Py_buffer at = {.buf = NULL, .obj = NULL};
    Py_ssize_t start = 0, count = find_rows(PyTuple_GET_ITEM(part, COLUMNS_POSITIONS), size, &start, &at);
    PyObject *values = PyTuple_GET_ITEM(part, COLUMNS_VALUES);
    int fits = count >= 0;
    if (fits)
        fits = (is_of_floats(kind->schema) ? put_table : put_arrays)(values, kind, start, &at, count, targets);
    PyBuffer_Release(&at);
    return fits;
}

/* An array of a key's own; -1: exception. */
static int make_target(PyObject *name, Py_ssize_t size, Target *target) {
    PyObject *dtype = PyTuple_GET_ITEM(name, NAME_DTYPE);
    PyObject *first = Py_BuildValue("(n)", size);
    PyObject *shape = first == NULL ? NULL : PySequence_Concat(first, PyTuple_GET_ITEM(name, NAME_SHAPE));
    Py_XDECREF(first);
    target->array = zeros(shape, dtype == Py_None ? float64_dtype : dtype, &target->view);
    if (target->array == NULL)
        return -1;
    target->values = target->view.buf;
    target->bytes = size ? target->view.len / size : 0;
    target->narrow = dtype != Py_None;
    return 0;
}

/* Puts what a row of the table, or an array, and a row of masks are, under the keys of their name. */
static int put_row(PyObject *infos, PyObject *name, const Target *target, PyObject *table, PyObject *masks,
                   Py_ssize_t row) {
    PyObject *values = target->array != NULL ? Py_NewRef(target->array) : PySequence_GetItem(table, row);
    PyObject *mask = PySequence_GetItem(masks, row), *dtype = PyTuple_GET_ITEM(name, NAME_DTYPE);
    if (values != NULL && mask != NULL && target->array == NULL && dtype != Py_None)
        Py_SETREF(values, PyObject_CallMethodOneArg(values, str_astype, dtype));
    int failed = values == NULL || mask == NULL ||
                 PyDict_SetItem(infos, PyTuple_GET_ITEM(name, NAME_KEY), values) < 0 ||
                 PyDict_SetItem(infos, PyTuple_GET_ITEM(name, NAME_MASK_KEY), mask) < 0;
    Py_XDECREF(values);
    Py_XDECREF(mask);
    return failed ? -1 : 0;
}

/* The info dict; NULL if parts do not fit, or with an exception. */
static PyObject *merge_all(PyObject *parts, Merged *merged, Py_ssize_t size, PyObject *named) {
    Py_buffer values = {.obj = NULL}, flags = {.obj = NULL};
    Target targets[MAX_KEYS];
    Py_ssize_t keys = merged->count, made = 0;
    PyObject *table = NULL, *infos = NULL;
    PyObject *masks = zeros(Py_BuildValue("(nn)", keys, size), bool_dtype, &flags);
    int fits = masks != NULL, tables = 1;
    for (int i = 0; i < merged->kinds; i++)
        tables = tables && is_of_floats(merged->of[i].schema);
    if (fits && tables) /* all in one */
        fits = (table = zeros(Py_BuildValue("(nn)", keys, size), float64_dtype, &values)) != NULL;
    for (; fits && made < keys; made++) {
        Target *target = &targets[made];
        *target = (Target){.bytes = 8};
        if (table != NULL)
            target->values = (char *)values.buf + 8 * made * size;
        else if (make_target(merged->names[made], size, target) < 0)
            break;
        target->mask = (char *)flags.buf + made * size;
    }
    fits = fits && made == keys;
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(parts); i++) {
        PyObject *part = PyTuple_GET_ITEM(parts, i);
        fits = put_part(part, kind_of(merged, part, named), size, targets);
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&flags);
    if (fits)
        infos = PyDict_New();
    for (int row = 0; infos != NULL && row < keys; row++)
        if (put_row(infos, merged->names[row], &targets[row], table, masks, row) < 0)
            Py_CLEAR(infos);
    while (made)
        if (targets[--made].array != NULL) {
            PyBuffer_Release(&targets[made].view);
            Py_DECREF(targets[made].array);
        }
    Py_XDECREF(table);
    Py_XDECREF(masks);
    return infos;
}

PyObject *merge_columns(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 3 || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "merge_columns: expected parts, a size, and a dict of names");
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
