/* Read the payload of a reply as columns, if each has a dtype: see core/requests.py and ipc/messages.py. */

#include "c.h"

int is_tuple_of_size(PyObject *object, Py_ssize_t size) {
    return PyTuple_Check(object) && PyTuple_GET_SIZE(object) == size;
}

int is_schema(PyObject *schema) {
    return is_tuple_of_size(schema, SCHEMA_FIELDS) && PyTuple_CheckExact(PyTuple_GET_ITEM(schema, SCHEMA_COLUMNS)) &&
           PyTuple_GET_ITEM(schema, SCHEMA_BY_ROW) == Py_False;
}

int has_float_table(PyObject *schema) { return PyTuple_GET_ITEM(schema, SCHEMA_FLOATS) == Py_True; }

int view_numbers(PyObject *array, int axes, const char *formats, Py_buffer *view) {
    if (Py_TYPE(array) != (PyTypeObject *)numpy_array ||
        PyObject_GetBuffer(array, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 0;
    }
    const char *format = view->format + (view->format[0] == '='); /* '=': the numbers may be unaligned */
    if (view->ndim == axes && view->itemsize == 8 && format[0] && !format[1] && strchr(formats, format[0]))
        return 1;
    PyBuffer_Release(view);
    return 0;
}

int64_t int64_at(const Py_buffer *view, Py_ssize_t index) {
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

/* The rows of a worker request. */
typedef struct {
    PyObject *start, *stop, *schemas;
    uint32_t first_row, first_slot; /* in the batch; of its worker */
    Py_buffer slots;
} RequestRows;

/* Return 1, 0 if an attribute is not as expected, or -1 with an exception. */
static int find_request_rows(References *refs, PyObject *part, RequestRows *request_rows) {
    PyObject *slots = look_up(refs, part, str_slots), *member = look_up(refs, part, str_member);
    PyObject *first = look_up(refs, member, str_start);
    request_rows->start = look_up(refs, part, str_start);
    request_rows->stop = look_up(refs, part, str_stop);
    request_rows->schemas = look_up(refs, look_up(refs, member, str_schemas), str__schemas);
    if (PyErr_Occurred())
        return -1;
    uint32_t end;
    if (as_uint32(request_rows->start, &request_rows->first_row) || as_uint32(request_rows->stop, &end) ||
        as_uint32(first, &request_rows->first_slot) || !PyDict_CheckExact(request_rows->schemas) ||
        !view_numbers(slots, 1, "lq", &request_rows->slots))
        return 0;
    if (request_rows->slots.shape[0] == (Py_ssize_t)end - (Py_ssize_t)request_rows->first_row)
        return 1;
    PyBuffer_Release(&request_rows->slots);
    return 0;
}

/* Return the batch position of a worker's row; -1 if the request has no such row. */
static int64_t batch_position(const RequestRows *request_rows, uint32_t row) {
    int64_t slot = (int64_t)request_rows->first_slot + row;
    Py_ssize_t low = 0, high = request_rows->slots.shape[0];
    uint64_t guess = high ? (uint64_t)slot - (uint64_t)int64_at(&request_rows->slots, 0) : 0;
    if (guess < (uint64_t)high && int64_at(&request_rows->slots, (Py_ssize_t)guess) == slot)
        return request_rows->first_row + (int64_t)guess; /* right if the slots are successive */
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (int64_at(&request_rows->slots, middle) < slot)
            low = middle + 1;
        else
            high = middle;
    }
    return low < request_rows->slots.shape[0] && int64_at(&request_rows->slots, low) == slot
               ? request_rows->first_row + low
               : -1;
}

/* Return the batch positions of rows; NULL if one is not in the request, or with an exception. */
static PyObject *batch_positions(const RequestRows *request_rows, const uint8_t *rows, Py_ssize_t count) {
    Py_buffer view;
    PyObject *positions = zeros(PyLong_FromSsize_t(count), int64_dtype, &view);
    if (positions == NULL)
        return NULL;
    int64_t *to = view.buf;
    Py_ssize_t i = 0;
    while (i < count && (to[i] = batch_position(request_rows, read_uint32(rows + 4 * i))) >= 0)
        i++;
    PyBuffer_Release(&view);
    if (i < count)
        Py_CLEAR(positions);
    return positions;
}

/* Return the size in bytes of `rows` rows of a column. Return -1 if it is above `most`, if the column has no dtype,
 * or with an exception. */
static Py_ssize_t column_bytes(PyObject *column, Py_ssize_t rows, Py_ssize_t most) {
    if (!is_tuple_of_size(column, COLUMN_FIELDS) || PyTuple_GET_ITEM(column, COLUMN_DTYPE) == Py_None ||
        !PyTuple_CheckExact(PyTuple_GET_ITEM(column, COLUMN_SHAPE)) ||
        PyTuple_GET_ITEM(column, COLUMN_AS_OBJECTS) != Py_False)
        return -1;
    PyObject *shape = PyTuple_GET_ITEM(column, COLUMN_SHAPE);
    PyObject *number = PyObject_GetAttr(PyTuple_GET_ITEM(column, COLUMN_DTYPE), str_itemsize);
    Py_ssize_t size = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    int is_empty = rows == 0;
    for (Py_ssize_t axis = -1; size > 0 && axis < PyTuple_GET_SIZE(shape); axis++) {
        Py_ssize_t length = axis < 0 ? rows : PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, axis));
        is_empty = is_empty || length == 0; /* a zero may follow large lengths */
        if (length < 0 || (length && size > PY_SSIZE_T_MAX / length))
            return -1;
        size *= length ? length : 1;
    }
    return is_empty ? 0 : size > most ? -1 : size;
}

/* Return an array of `rows` rows of a column as a view that keeps the payload alive, and move `offset` to its end.
 * Return NULL if that is beyond `end`, if there is no such array, or with an exception. */
static PyObject *view_column(PyObject *column, Py_ssize_t rows, PyObject *payload, Py_ssize_t *offset, Py_ssize_t end) {
    Py_ssize_t size = column_bytes(column, rows, end - *offset);
    PyObject *first = size < 0 ? NULL : Py_BuildValue("(n)", rows), *array = NULL;
    PyObject *shape = first == NULL ? NULL : PySequence_Concat(first, PyTuple_GET_ITEM(column, COLUMN_SHAPE));
    if (shape != NULL)
        array =
            PyObject_CallFunction(numpy_array, "OOOn", shape, PyTuple_GET_ITEM(column, COLUMN_DTYPE), payload, *offset);
    *offset += size;
    Py_XDECREF(first);
    Py_XDECREF(shape);
    return array;
}

/* Return the columns of a schema in the same way: one table if all are floats, else a list. */
static PyObject *view_columns(PyObject *schema, Py_ssize_t rows, PyObject *payload, Py_ssize_t *offset,
                              Py_ssize_t end) {
    PyObject *columns = PyTuple_GET_ITEM(schema, SCHEMA_COLUMNS);
    Py_ssize_t count = PyTuple_GET_SIZE(columns), at = *offset;
    if (has_float_table(schema)) {
        *offset += 8 * count * rows;
        if (*offset != end)
            return NULL;
        return PyObject_CallFunction(numpy_array, "(nn)OOn", count, rows, float64_dtype, payload, at);
    }
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *array = view_column(PyTuple_GET_ITEM(columns, i), rows, payload, offset, end);
        if (array == NULL || PyList_Append(list, array) < 0)
            Py_CLEAR(list);
        Py_XDECREF(array);
    }
    return list;
}

/* Return the group that starts at `offset` as a `columns_type`, and move `offset` to its end. Return NULL if the
 * group is malformed, or with an exception. */
static PyObject *read_group(const RequestRows *request_rows, PyObject *payload, const Py_buffer *view,
                            Py_ssize_t *offset, PyObject *columns_type) {
    Py_ssize_t left = view->len - *offset - GROUP_HEAD;
    if (left < 0)
        return NULL;
    const uint8_t *head = (const uint8_t *)view->buf + *offset;
    uint32_t count = read_uint32(head + 4);
    int all_rows = count == UINT32_MAX;
    Py_ssize_t rows = all_rows ? request_rows->slots.shape[0] : (Py_ssize_t)count;
    Py_ssize_t row_bytes = all_rows ? 0 : 4 * rows;
    PyObject *number = PyLong_FromUnsignedLong(read_uint32(head));
    PyObject *schema = number == NULL ? NULL : PyDict_GetItemWithError(request_rows->schemas, number);
    Py_XDECREF(number);
    uint64_t values_bytes = read_uint32(head + 8) | (uint64_t)read_uint32(head + 12) << 32;
    if (schema == NULL || !is_schema(schema) || row_bytes > left || values_bytes > (uint64_t)(left - row_bytes) ||
        PyTuple_GET_SIZE(PyTuple_GET_ITEM(schema, SCHEMA_COLUMNS)) > MAX_KEYS)
        return NULL;
    Py_INCREF(schema); /* the dict may drop it meanwhile */
    *offset += GROUP_HEAD + row_bytes;
    Py_ssize_t end = *offset + (Py_ssize_t)values_bytes;
    PyObject *positions = NULL, *values = NULL, *fields = NULL, *columns = NULL;
    positions = all_rows ? PySlice_New(request_rows->start, request_rows->stop, NULL)
                         : batch_positions(request_rows, head + GROUP_HEAD, rows);
    if (positions != NULL)
        values = view_columns(schema, rows, payload, offset, end);
    if (values != NULL && *offset == end)
        fields = PyTuple_Pack(COLUMNS_FIELDS, positions, schema, values);
    if (fields != NULL)
        columns = PyObject_CallFunctionObjArgs(tuple_new, columns_type, fields, NULL);
    Py_DECREF(schema);
    Py_XDECREF(positions);
    Py_XDECREF(values);
    Py_XDECREF(fields);
    return columns;
}

/* Return a list of all groups of a payload; NULL if one is malformed, or with an exception. */
static PyObject *read_groups(const RequestRows *request_rows, PyObject *payload, const Py_buffer *view,
                             PyObject *columns_type) {
    Py_ssize_t offset = COLUMNS_HEAD;
    PyObject *groups = PyList_New(0);
    for (uint32_t count = read_uint32((const uint8_t *)view->buf + 1); groups != NULL && count; count--) {
        PyObject *group = read_group(request_rows, payload, view, &offset, columns_type);
        if (group == NULL || PyList_Append(groups, group) < 0)
            Py_CLEAR(groups);
        Py_XDECREF(group);
    }
    if (groups != NULL && offset != view->len)
        Py_CLEAR(groups);
    return groups;
}

/* View the memory of a payload. Return 0 if `dump_columns` can't have made it. */
static int view_payload(PyObject *payload, Py_buffer *view) {
    if (!PyMemoryView_Check(payload) || PyObject_GetBuffer(payload, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 0;
    }
    if (view->ndim == 1 && !strcmp(view->format, "B") && view->len >= COLUMNS_HEAD &&
        *(const char *)view->buf == COLUMNS_TAG)
        return 1;
    PyBuffer_Release(view);
    return 0;
}

PyObject *read_columns(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    if (argc != 3) {
        PyErr_SetString(PyExc_TypeError, "read_columns: expected a part, a payload and the type of columns");
        return NULL;
    }
    References refs = {.count = 0};
    RequestRows request_rows;
    Py_buffer view;
    PyObject *groups = NULL;
    if (!view_payload(args[1], &view))
        Py_RETURN_NONE;
    if (find_request_rows(&refs, args[0], &request_rows) == 1) {
        groups = read_groups(&request_rows, args[1], &view, args[2]);
        PyBuffer_Release(&request_rows.slots);
    }
    PyBuffer_Release(&view);
    release_references(&refs);
    return groups != NULL || PyErr_Occurred() ? groups : Py_NewRef(Py_None);
}
