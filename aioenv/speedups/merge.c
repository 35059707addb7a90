/* Merge columns that have a dtype into the info dict of a batch: see spaces/infos.py. */

#include "c.h"

enum { MAX_SCHEMAS = 16 };

/* A schema, the names of its columns (`spaces.infos.ColumnName`), and the indices of these names among all keys. */
typedef struct {
    PyObject *schema, *names;
    int indices[MAX_KEYS];
} NamedSchema;

/* All keys, each with a name, and the schemas that have them. */
typedef struct {
    int count, schema_count;
    PyObject *names[MAX_KEYS];
    NamedSchema schemas[MAX_SCHEMAS];
} MergedKeys;

/* Return 1 if two names have the same key, dtype and shape, 0 if the keys differ, or -1 if only the dtypes or shapes
 * do. */
static int compare_names(PyObject *name, PyObject *other) {
    if (PyObject_RichCompareBool(PyTuple_GET_ITEM(name, NAME_KEY), PyTuple_GET_ITEM(other, NAME_KEY), Py_EQ) != 1)
        return 0;
    for (int part = NAME_DTYPE; part <= NAME_SHAPE; part++) {
        PyObject *left = PyTuple_GET_ITEM(name, part), *right = PyTuple_GET_ITEM(other, part);
        if (left != right && (left == Py_None || right == Py_None || PyObject_RichCompareBool(left, right, Py_EQ) != 1))
            return -1; /* numpy accepts None as a dtype */
    }
    return 1;
}

/* Return the index of a name, which is added if it is new; -1 if it can't be merged. */
static int key_index(MergedKeys *merged, PyObject *name) {
    if (!is_tuple_of_size(name, NAME_FIELDS) || !PyUnicode_CheckExact(PyTuple_GET_ITEM(name, NAME_KEY)) ||
        !PyUnicode_CheckExact(PyTuple_GET_ITEM(name, NAME_MASK_KEY)) ||
        !PyTuple_CheckExact(PyTuple_GET_ITEM(name, NAME_SHAPE)))
        return -1;
    for (int row = 0; row < merged->count; row++) {
        int same = compare_names(name, merged->names[row]);
        if (same)
            return same > 0 ? row : -1;
    }
    if (merged->count == MAX_KEYS)
        return -1;
    merged->names[merged->count] = name;
    return merged->count++;
}

/* Return the schema of a part with its names; NULL if Python has not named its columns. */
static const NamedSchema *find_named_schema(MergedKeys *merged, PyObject *part, PyObject *named) {
    if (!is_tuple_of_size(part, COLUMNS_FIELDS))
        return NULL;
    PyObject *schema = PyTuple_GET_ITEM(part, COLUMNS_SCHEMA);
    for (int i = 0; i < merged->schema_count; i++)
        if (merged->schemas[i].schema == schema)
            return &merged->schemas[i];
    if (!is_schema(schema) || merged->schema_count == MAX_SCHEMAS)
        return NULL;
    PyObject *id = PyLong_FromVoidPtr(schema), *known = id == NULL ? NULL : PyDict_GetItemWithError(named, id);
    Py_XDECREF(id);
    if (known == NULL || !is_tuple_of_size(known, 2) || PyTuple_GET_ITEM(known, 0) != schema ||
        !PyTuple_CheckExact(PyTuple_GET_ITEM(known, 1)) || PyTuple_GET_SIZE(PyTuple_GET_ITEM(known, 1)) > MAX_KEYS)
        return NULL;
    NamedSchema *named_schema = &merged->schemas[merged->schema_count++];
    named_schema->schema = schema;
    named_schema->names = Py_NewRef(PyTuple_GET_ITEM(known, 1));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(named_schema->names); i++)
        if ((named_schema->indices[i] = key_index(merged, PyTuple_GET_ITEM(named_schema->names, i))) < 0)
            return NULL;
    return named_schema;
}

/* Return the number of rows of a part. They begin at `start`, or `at` is set to a view of their indices. Return < 0
 * if a row is outside the batch of `size` rows. */
static Py_ssize_t count_rows(PyObject *positions, Py_ssize_t size, Py_ssize_t *start, Py_buffer *at) {
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
        if (int64_at(at, i) < 0 || int64_at(at, i) >= size)
            return -1;
    return count;
}

/* Where the values of a key go. */
typedef struct {
    PyObject *array; /* NULL: a row of the table */
    Py_buffer view;
    char *values, *mask;
    Py_ssize_t bytes; /* per row of the batch */
    int narrow;       /* 1: float64 values of a table do not fit */
} Target;

/* Copy a part's values of one key to their rows, and set the mask there. */
static void copy_values(const Target *target, const char *from, Py_ssize_t start, const Py_buffer *at,
                        Py_ssize_t count) {
    size_t bytes = (size_t)target->bytes;
    if (at->obj == NULL) {
        memcpy(target->values + (size_t)start * bytes, from, (size_t)count * bytes);
        memset(target->mask + start, 1, (size_t)count);
        return;
    }
    for (Py_ssize_t i = 0; i < count; i++, from += bytes) {
        memcpy(target->values + (size_t)int64_at(at, i) * bytes, from, bytes);
        target->mask[int64_at(at, i)] = 1;
    }
}

/* Copy the rows of a table to their targets. Return 0 if they do not fit. */
static int copy_table(PyObject *table, const NamedSchema *named_schema, Py_ssize_t start, const Py_buffer *at,
                      Py_ssize_t count, const Target *targets) {
    Py_buffer view;
    if (!view_numbers(table, 2, "d", &view))
        return 0;
    Py_ssize_t keys = PyTuple_GET_SIZE(named_schema->names);
    int fits = view.shape[0] == keys && view.shape[1] == count;
    for (Py_ssize_t key = 0; fits && key < keys; key++) {
        const Target *target = &targets[named_schema->indices[key]];
        fits = target->bytes == 8 && !target->narrow;
        if (fits)
            copy_values(target, (const char *)view.buf + 8 * key * count, start, at, count);
    }
    PyBuffer_Release(&view);
    return fits;
}

/* Copy a list of arrays to their targets. Return 0 if they do not fit. */
static int copy_arrays(PyObject *arrays, const NamedSchema *named_schema, Py_ssize_t start, const Py_buffer *at,
                       Py_ssize_t count, const Target *targets) {
    Py_ssize_t keys = PyTuple_GET_SIZE(named_schema->names);
    int fits = PyList_CheckExact(arrays) && PyList_GET_SIZE(arrays) == keys;
    for (Py_ssize_t key = 0; fits && key < keys; key++) {
        const Target *target = &targets[named_schema->indices[key]];
        PyObject *array = PyList_GET_ITEM(arrays, key);
        Py_buffer view;
        fits = Py_TYPE(array) == (PyTypeObject *)numpy_array &&
               PyObject_GetBuffer(array, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0;
        if (!fits)
            break;
        fits = view.ndim && view.shape[0] == count && view.len == count * target->bytes;
        if (fits)
            copy_values(target, view.buf, start, at, count);
        PyBuffer_Release(&view);
    }
    PyErr_Clear();
    return fits;
}

static int copy_part(PyObject *part, const NamedSchema *named_schema, Py_ssize_t size, const Target *targets) {
    Py_buffer at = {.buf = NULL, .obj = NULL};
    Py_ssize_t start = 0, count = count_rows(PyTuple_GET_ITEM(part, COLUMNS_POSITIONS), size, &start, &at);
    PyObject *values = PyTuple_GET_ITEM(part, COLUMNS_VALUES);
    int fits = count >= 0;
    if (fits)
        fits = (has_float_table(named_schema->schema) ? copy_table : copy_arrays)(values, named_schema, start, &at,
                                                                                  count, targets);
    PyBuffer_Release(&at);
    return fits;
}

/* Make the array of one key; -1: exception. */
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

/* Set a key of the info dict to its values, and the mask's key to its mask; -1: exception. */
static int set_info_key(PyObject *infos, PyObject *name, const Target *target, PyObject *table, PyObject *masks,
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

/* Return the info dict; NULL if parts do not fit, or with an exception. */
static PyObject *merge_parts(PyObject *parts, MergedKeys *merged, Py_ssize_t size, PyObject *named) {
    Py_buffer values = {.obj = NULL}, flags = {.obj = NULL};
    Target targets[MAX_KEYS];
    Py_ssize_t keys = merged->count, made = 0;
    PyObject *table = NULL, *infos = NULL;
    PyObject *masks = zeros(Py_BuildValue("(nn)", keys, size), bool_dtype, &flags);
    int fits = masks != NULL, tables = 1;
    for (int i = 0; i < merged->schema_count; i++)
        tables = tables && has_float_table(merged->schemas[i].schema);
    if (fits && tables) /* one table holds all columns */
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
        fits = copy_part(part, find_named_schema(merged, part, named), size, targets);
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&flags);
    if (fits)
        infos = PyDict_New();
    for (int row = 0; infos != NULL && row < keys; row++)
        if (set_info_key(infos, merged->names[row], &targets[row], table, masks, row) < 0)
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
        PyErr_SetString(PyExc_TypeError, "merge_columns: expected parts, a size and a dict of names");
        return NULL;
    }
    uint32_t size;
    if ((!PyList_CheckExact(args[0]) && !PyTuple_CheckExact(args[0])) || as_uint32(args[1], &size))
        Py_RETURN_NONE;
    PyObject *parts = PySequence_Tuple(args[0]), *infos = NULL; /* a copy: the list may change meanwhile */
    if (parts == NULL)
        return NULL;
    MergedKeys merged;
    merged.count = merged.schema_count = 0;
    Py_ssize_t known = 0, count = PyTuple_GET_SIZE(parts);
    while (known < count && find_named_schema(&merged, PyTuple_GET_ITEM(parts, known), args[2]) != NULL)
        known++;
    if (known < count)
        PyErr_Clear();
    else if (count)
        infos = merge_parts(parts, &merged, size, args[2]);
    while (merged.schema_count)
        Py_DECREF(merged.schemas[--merged.schema_count].names);
    Py_DECREF(parts);
    return infos != NULL || PyErr_Occurred() ? infos : Py_NewRef(Py_None);
}
