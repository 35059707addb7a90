/* The tail of a reply as columns, where all of them have a dtype: see core/payloads.py and ipc/messages.py. */

#include "c.h"

int is_tuple_of(PyObject *object, Py_ssize_t size) {
    return PyTuple_Check(object) && PyTuple_GET_SIZE(object) == size;
}

int is_schema(PyObject *schema) {
    return is_tuple_of(schema, SCHEMA_FIELDS) && PyTuple_CheckExact(PyTuple_GET_ITEM(schema, SCHEMA_COLUMNS)) &&
           PyTuple_GET_ITEM(schema, SCHEMA_BY_ROW) == Py_False;
}

int is_of_floats(PyObject *schema) { return PyTuple_GET_ITEM(schema, SCHEMA_FLOATS) == Py_True; }

int view_numbers(PyObject *array, int axes, const char *formats, Py_buffer *view) {
    if (Py_TYPE(array) != (PyTypeObject *)numpy_array ||
        PyObject_GetBuffer(array, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 0;
    }
    const char *format = view->format + (view->format[0] == '='); /* which says that they are not aligned */
    if (view->ndim == axes && view->itemsize == 8 && format[0] && !format[1] && strchr(formats, format[0]))
        return 1;
    PyBuffer_Release(view);
    return 0;
}

int64_t number_in(const Py_buffer *view, Py_ssize_t index) {
    int64_t number;
    memcpy(&number, (const char *)view->buf + index * (Py_ssize_t)sizeof number, sizeof number);
    return number;
}

PyObject *zeros(PyObject *shape, PyObject *dtype, Py_buffer *view) {
    PyObject *array = shape == NULL ? NULL : PyObject_CallFunctionObjArgs(numpy_zeros, shape, dtype, NULL);
    Py_XDECREF(shape);
    if (array != NULL && PyObject_GetBuffer(array, view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0)
        Py_CLEAR(array);
    return array;
}

/* A part of an exchange. */
typedef struct {
    PyObject *start, *stop, *schemas;
    uint32_t first_row, first_slot; /* of it in the batch; of its worker */
    Py_buffer slots;
} Share;

/* 1, 0 if it is not as it should be, -1: exception. */
static int find_share(Held *held, PyObject *part, Share *share) {
    PyObject *slots = look_up(held, part, str_slots), *member = look_up(held, part, str_member);
    PyObject *first = look_up(held, member, str_start);
    share->start = look_up(held, part, str_start);
    share->stop = look_up(held, part, str_stop);
    share->schemas = look_up(held, look_up(held, member, str_schemas), str__schemas);
    if (PyErr_Occurred())
        return -1;
    uint32_t end;
    if (as_word(share->start, &share->first_row) || as_word(share->stop, &end) || as_word(first, &share->first_slot) ||
        !PyDict_CheckExact(share->schemas) || !view_numbers(slots, 1, "lq", &share->slots))
        return 0;
    if (share->slots.shape[0] == (Py_ssize_t)end - (Py_ssize_t)share->first_row)
        return 1;
    PyBuffer_Release(&share->slots);
    return 0;
}

/* Where a row of the worker stands in the batch; -1 if the part has no such row. */
static int64_t position_of(const Share *share, uint32_t row) {
    int64_t slot = (int64_t)share->first_slot + row;
    Py_ssize_t low = 0, high = share->slots.shape[0];
    uint64_t guess = high ? (uint64_t)slot - (uint64_t)number_in(&share->slots, 0) : 0;
    if (guess < (uint64_t)high && number_in(&share->slots, (Py_ssize_t)guess) == slot)
        return share->first_row + (int64_t)guess; /* right where they follow one another */
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (number_in(&share->slots, middle) < slot)
            low = middle + 1;
        else
            high = middle;
    }
    return low < share->slots.shape[0] && number_in(&share->slots, low) == slot ? share->first_row + low : -1;
}

/* The positions of some rows; NULL if there are no such rows, or with an exception. */
static PyObject *positions_of(const Share *share, const uint8_t *rows, Py_ssize_t count) {
    Py_buffer view;
    PyObject *positions = zeros(PyLong_FromSsize_t(count), int64_dtype, &view);
    if (positions == NULL)
        return NULL;
    int64_t *to = view.buf;
    Py_ssize_t i = 0;
    while (i < count && (to[i] = position_of(share, word_at(rows + 4 * i))) >= 0)
        i++;
    PyBuffer_Release(&view);
    if (i < count)
        Py_CLEAR(positions);
    return positions;
}

/* How many bytes so many rows of a column take; -1 if they are more than `most`, or it has no dtype, or with an
 * exception. */
static Py_ssize_t bytes_of(PyObject *column, Py_ssize_t rows, Py_ssize_t most) {
    if (!is_tuple_of(column, COLUMN_FIELDS) || PyTuple_GET_ITEM(column, COLUMN_DTYPE) == Py_None ||
        !PyTuple_CheckExact(PyTuple_GET_ITEM(column, COLUMN_SHAPE)) || PyTuple_GET_ITEM(column, COLUMN_AS_OBJECTS) != Py_False)
        return -1;
    PyObject *shape = PyTuple_GET_ITEM(column, COLUMN_SHAPE);
    PyObject *number = PyObject_GetAttr(PyTuple_GET_ITEM(column, COLUMN_DTYPE), str_itemsize);
    Py_ssize_t size = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    int none = rows == 0;
    for (Py_ssize_t axis = -1; size > 0 && axis < PyTuple_GET_SIZE(shape); axis++) {
        Py_ssize_t length = axis < 0 ? rows : PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, axis));
        none = none || length == 0; /* which may come after large ones */
        if (length < 0 || (length && size > PY_SSIZE_T_MAX / length))
            return -1;
        size *= length ? length : 1;
    }
    return none ? 0 : size > most ? -1 : size;
}

/* An array of so many rows of a column over the tail's own memory, which it keeps alive, and its end; NULL if that is not
 * before `end`, or there is no such array, or with an exception. */
static PyObject *view_column(PyObject *column, Py_ssize_t rows, PyObject *tail, Py_ssize_t *offset, Py_ssize_t end) {
    Py_ssize_t size = bytes_of(column, rows, end - *offset);
    PyObject *first = size < 0 ? NULL : Py_BuildValue("(n)", rows), *array = NULL;
    PyObject *shape = first == NULL ? NULL : PySequence_Concat(first, PyTuple_GET_ITEM(column, COLUMN_SHAPE));
    if (shape != NULL)
        array = PyObject_CallFunction(numpy_array, "OOOn", shape, PyTuple_GET_ITEM(column, COLUMN_DTYPE), tail, *offset);
    *offset += size;
    Py_XDECREF(first);
    Py_XDECREF(shape);
    return array;
}

/* The columns of a schema, likewise: one table if they are floats, else a list. */
static PyObject *view_columns(PyObject *schema, Py_ssize_t rows, PyObject *tail, Py_ssize_t *offset, Py_ssize_t end) {
    PyObject *columns = PyTuple_GET_ITEM(schema, SCHEMA_COLUMNS);
    Py_ssize_t count = PyTuple_GET_SIZE(columns), at = *offset;
    if (is_of_floats(schema)) {
        *offset += 8 * count * rows;
        if (*offset != end)
            return NULL;
        return PyObject_CallFunction(numpy_array, "(nn)OOn", count, rows, float64_dtype, tail, at);
    }
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *array = view_column(PyTuple_GET_ITEM(columns, i), rows, tail, offset, end);
        if (array == NULL || PyList_Append(list, array) < 0)
            Py_CLEAR(list);
        Py_XDECREF(array);
    }
    return list;
}

/* The group that begins there, as a `kind`, and its end; NULL if it is not as it should be, or with an exception. */
static PyObject *read_group(const Share *share, PyObject *tail, const Py_buffer *view, Py_ssize_t *offset,
                            PyObject *kind) {
    Py_ssize_t left = view->len - *offset - GROUP_HEAD;
    if (left < 0)
        return NULL;
    const uint8_t *head = (const uint8_t *)view->buf + *offset;
    uint32_t count = word_at(head + 4);
    int all = count == UINT32_MAX;
    Py_ssize_t rows = all ? share->slots.shape[0] : (Py_ssize_t)count, row_bytes = all ? 0 : 4 * rows;
    PyObject *number = PyLong_FromUnsignedLong(word_at(head));
    PyObject *schema = number == NULL ? NULL : PyDict_GetItemWithError(share->schemas, number);
    Py_XDECREF(number);
    uint64_t said = word_at(head + 8) | (uint64_t)word_at(head + 12) << 32;
    if (schema == NULL || !is_schema(schema) || row_bytes > left || said > (uint64_t)(left - row_bytes) ||
        PyTuple_GET_SIZE(PyTuple_GET_ITEM(schema, SCHEMA_COLUMNS)) > MAX_KEYS)
        return NULL;
    Py_INCREF(schema); /* whoever else has it may let go of it */
    *offset += GROUP_HEAD + row_bytes;
    Py_ssize_t end = *offset + (Py_ssize_t)said;
    PyObject *positions = NULL, *values = NULL, *three = NULL, *columns = NULL;
    positions = all ? PySlice_New(share->start, share->stop, NULL) : positions_of(share, head + GROUP_HEAD, rows);
    if (positions != NULL)
        values = view_columns(schema, rows, tail, offset, end);
    if (values != NULL && *offset == end)
        three = PyTuple_Pack(COLUMNS_FIELDS, positions, schema, values);
    if (three != NULL)
        columns = PyObject_CallFunctionObjArgs(tuple_new, kind, three, NULL);
    Py_DECREF(schema);
    Py_XDECREF(positions);
    Py_XDECREF(values);
    Py_XDECREF(three);
    return columns;
}

/* All groups of a tail, a list; NULL if one is not as it should be, or with an exception. */
static PyObject *read_groups(const Share *share, PyObject *tail, const Py_buffer *view, PyObject *kind) {
    Py_ssize_t offset = COLUMNS_HEAD;
    PyObject *groups = PyList_New(0);
    for (uint32_t count = word_at((const uint8_t *)view->buf + 1); groups != NULL && count; count--) {
        PyObject *group = read_group(share, tail, view, &offset, kind);
        if (group == NULL || PyList_Append(groups, group) < 0)
            Py_CLEAR(groups);
        Py_XDECREF(group);
    }
    if (groups != NULL && offset != view->len)
        Py_CLEAR(groups);
    return groups;
}

/* The memory of a tail that `dump_columns` may have made; 0 if it has not. */
static int view_tail(PyObject *tail, Py_buffer *view) {
    if (!PyMemoryView_Check(tail) || PyObject_GetBuffer(tail, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 0;
    }
    if (view->ndim == 1 && !strcmp(view->format, "B") && view->len >= COLUMNS_HEAD && *(const char *)view->buf == COLUMNS_TAG)
        return 1;
    PyBuffer_Release(view);
    return 0;
}

PyObject *read_columns(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 3) {
        PyErr_SetString(PyExc_TypeError, "read_columns: expected a part, a tail, and what columns are");
        return NULL;
    }
    Held held = {.count = 0};
    Share share;
    Py_buffer view;
    PyObject *groups = NULL;
    if (!view_tail(args[1], &view))
        Py_RETURN_NONE;
    if (find_share(&held, args[0], &share) == 1) {
        groups = read_groups(&share, args[1], &view, args[2]);
        PyBuffer_Release(&share.slots);
    }
    PyBuffer_Release(&view);
    let_go(&held);
    return groups != NULL || PyErr_Occurred() ? groups : Py_NewRef(Py_None);
}
