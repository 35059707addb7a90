/* Info dicts as columns, if all values are numbers, or arrays of the same dtypes and shapes each time: see
 * spaces/infos.py and ipc/messages.py. */

#include "c.h"

/* How to copy a value: as a Python number, or as the bytes of its buffer. */
enum { COPY_FLOAT, COPY_INT, COPY_BOOL, COPY_BUFFER };

struct InfoItem {
    int copy_mode;
    Py_buffer template; /* a buffer like those of the column's values */
};

/* Limit of a worker's infos of one schema; larger ones are left to Python. */
static const Py_ssize_t MAX_GROUP_BYTES = (Py_ssize_t)1 << 26;

static PyObject *schema_field(PyObject *schema, int part) { return PyTuple_GET_ITEM(schema, part); }

static Py_ssize_t key_count(PyObject *schema) { return PyList_GET_SIZE(schema_field(schema, KNOWN_KEYS)); }

static int is_numeric_schema(PyObject *schema) {
    uint32_t number;
    if (!PyTuple_Check(schema) || PyTuple_GET_SIZE(schema) != KNOWN_FIELDS ||
        as_uint32(schema_field(schema, KNOWN_SCHEMA_ID), &number))
        return 0;
    for (int part = KNOWN_KEYS; part <= KNOWN_TEMPLATES; part++)
        if (!PyList_CheckExact(schema_field(schema, part)) ||
            PyList_GET_SIZE(schema_field(schema, part)) != key_count(schema))
            return 0;
    return key_count(schema) <= MAX_KEYS;
}

/* Return whether a dict has the keys of a schema, in order, and values of its types. */
static int has_types(PyObject *schema, PyObject *info) {
    PyObject *keys = schema_field(schema, KNOWN_KEYS), *types = schema_field(schema, KNOWN_TYPES), *key, *value;
    if (key_count(schema) != PyDict_GET_SIZE(info) || PyList_GET_SIZE(types) != key_count(schema))
        return 0;
    for (Py_ssize_t place = 0, i = 0; PyDict_Next(info, &place, &key, &value); i++) {
        PyObject *known = PyList_GET_ITEM(keys, i);
        int both_str = PyUnicode_CheckExact(key) && PyUnicode_CheckExact(known);
        if (key != known && (!both_str || PyUnicode_Compare(key, known)))
            return 0;
        if ((PyObject *)Py_TYPE(value) != PyList_GET_ITEM(types, i))
            return 0;
    }
    return 1;
}

/* Copy the buffer of a value if its format and shape are those of the template. */
static int copy_buffer(PyObject *value, const Py_buffer *template, char *to) {
    Py_buffer from;
    if (PyObject_GetBuffer(value, &from, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 0;
    }
    int same = from.len == template->len && from.ndim == template->ndim && !strcmp(from.format, template->format);
    for (int axis = 0; same && axis < template->ndim; axis++)
        same = from.shape[axis] == template->shape[axis];
    if (same)
        memcpy(to, from.buf, (size_t)from.len);
    PyBuffer_Release(&from);
    return same;
}

static int copy_value(PyObject *value, const InfoItem *item, char *to) {
    if (item->copy_mode == COPY_BUFFER)
        return copy_buffer(value, &item->template, to);
    double number = item->copy_mode == COPY_FLOAT ? PyFloat_AsDouble(value) : 0;
    long long whole = item->copy_mode == COPY_INT ? PyLong_AsLongLong(value) : 0;
    if ((number == -1 || whole == -1) && PyErr_Occurred()) { /* such as too large a number */
        PyErr_Clear();
        return 0;
    }
    if (item->copy_mode == COPY_BOOL)
        *to = value == Py_True;
    else
        memcpy(to, item->copy_mode == COPY_FLOAT ? (void *)&number : (void *)&whole, 8);
    return 1;
}

/* Add a dict to a group. Return 0 if it does not fit. */
static int add_row(Columns *columns, InfoGroup *group, PyObject *info, Py_ssize_t row) {
    PyObject *key, *value;
    if (!has_types(group->schema, info))
        return 0;
    char *to = group->values + group->used * group->row_bytes;
    for (Py_ssize_t place = 0, i = 0; i < group->keys && PyDict_Next(info, &place, &key, &value); i++) {
        if (!copy_value(value, &group->items[i], to))
            return 0;
        to += group->items[i].template.len;
    }
    group->rows[group->used++] = (uint32_t)row;
    columns->last = row;
    return 1;
}

static void free_group(InfoGroup *group) {
    for (Py_ssize_t i = 0; group->items != NULL && i < group->keys; i++)
        PyBuffer_Release(&group->items[i].template);
    PyMem_Free(group->items);
    PyMem_Free(group->values);
    PyMem_Free(group->rows);
    Py_DECREF(group->schema);
}

/* Return how to copy values of a type into a column with such a template; -1: not at all. */
static int copy_mode_of(PyObject *type, const Py_buffer *template) {
    const char *format = template->format;
    if (template->ndim || !format[0] || format[1])
        return COPY_BUFFER;
    if (type == (PyObject *)&PyLong_Type)
        return strchr("lq", format[0]) != NULL && template->len == 8 ? COPY_INT : -1;
    if (type == (PyObject *)&PyBool_Type)
        return format[0] == '?' ? COPY_BOOL : -1;
    if (format[0] == 'd') /* in a table, narrower floats too */
        return COPY_FLOAT;
    return type == (PyObject *)&PyFloat_Type ? -1 : COPY_BUFFER;
}

/* Start a group. Return 0 if C can't collect such infos. */
static int start_group(InfoGroup *group, PyObject *schema, Py_ssize_t rows) {
    *group = (InfoGroup){.schema = Py_NewRef(schema)};
    Py_ssize_t keys = key_count(schema);
    group->items = PyMem_Malloc((size_t)(keys + 1) * sizeof *group->items);
    int supported = group->items != NULL;
    while (supported && group->keys < keys) {
        InfoItem *item = &group->items[group->keys];
        PyObject *template = PyList_GET_ITEM(schema_field(schema, KNOWN_TEMPLATES), group->keys);
        supported = Py_TYPE(template) == (PyTypeObject *)numpy_array &&
                    PyObject_GetBuffer(template, &item->template, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0;
        if (!supported)
            break;
        group->keys++;
        group->row_bytes += item->template.len;
        item->copy_mode =
            copy_mode_of(PyList_GET_ITEM(schema_field(schema, KNOWN_TYPES), group->keys - 1), &item->template);
        supported = item->copy_mode >= 0 && group->row_bytes <= MAX_GROUP_BYTES / (rows + 1);
    }
    PyErr_Clear();
    if (supported) {
        group->values = PyMem_Malloc((size_t)(rows * group->row_bytes) + 1);
        group->rows = PyMem_Malloc((size_t)rows * sizeof *group->rows);
    }
    if (group->values != NULL && group->rows != NULL)
        return 1;
    free_group(group);
    return 0;
}

int add_info(Columns *columns, PyObject *info, Py_ssize_t row) {
    if (row <= columns->last) /* each row once, in ascending order */
        return 0;
    for (int i = 0; i < columns->count; i++)
        if (add_row(columns, &columns->groups[i], info, row))
            return 1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(columns->schemas) && columns->count < MAX_GROUPS; i++) {
        PyObject *schema = PyList_GET_ITEM(columns->schemas, i);
        InfoGroup *group = &columns->groups[columns->count];
        if (!is_numeric_schema(schema) || !has_types(schema, info) || !start_group(group, schema, columns->rows))
            continue;
        if (add_row(columns, group, info, row)) {
            columns->count++;
            return 1;
        }
        free_group(group);
    }
    return 0;
}

/* Return a dict equal to the one that was added as this row of the group. */
static PyObject *dict_of(const InfoGroup *group, Py_ssize_t index) {
    const char *from = group->values + index * group->row_bytes;
    PyObject *bytes = PyBytes_FromStringAndSize(from, group->row_bytes);
    PyObject *info = bytes == NULL ? NULL : PyObject_CallOneArg(schema_field(group->schema, KNOWN_MAKE_INFO), bytes);
    Py_XDECREF(bytes);
    return info;
}

int restore_infos(Columns *columns, PyObject *infos) {
    Py_ssize_t next[MAX_GROUPS] = {0};
    for (Py_ssize_t row = 0; row <= columns->last; row++)
        for (int i = 0; i < columns->count; i++) {
            InfoGroup *group = &columns->groups[i];
            if (next[i] == group->used || group->rows[next[i]] != (uint32_t)row)
                continue;
            PyObject *info = dict_of(group, next[i]++);
            PyObject *pair = info == NULL ? NULL : Py_BuildValue("(nN)", row, info);
            int failed = pair == NULL ? -1 : PyList_Append(infos, pair);
            Py_XDECREF(pair);
            if (failed < 0)
                return -1;
        }
    free_columns(columns);
    columns->schemas = NULL;
    return 0;
}

void free_columns(Columns *columns) {
    while (columns->count)
        free_group(&columns->groups[--columns->count]);
}

static char *write_number(char *to, uint64_t number, int bytes) {
    for (int i = 0; i < bytes; i++)
        *to++ = (char)(number >> 8 * i);
    return to;
}

PyObject *columns_payload(const Columns *columns) {
    Py_ssize_t size = columns->count ? 1 + 4 : 0;
    for (int i = 0; i < columns->count; i++) {
        const InfoGroup *group = &columns->groups[i];
        size += 4 + 4 + 8 + group->used * group->row_bytes;
        size += group->used < columns->rows ? 4 * group->used : 0;
    }
    PyObject *payload = PyBytes_FromStringAndSize(NULL, size);
    if (payload == NULL || !size)
        return payload;
    char *to = PyBytes_AS_STRING(payload);
    *to++ = COLUMNS_TAG;
    to = write_number(to, (uint64_t)columns->count, 4);
    for (int i = 0; i < columns->count; i++) {
        const InfoGroup *group = &columns->groups[i];
        int all = group->used == columns->rows;
        uint32_t number = 0;
        as_uint32(schema_field(group->schema, KNOWN_SCHEMA_ID), &number);
        to = write_number(to, number, 4);
        to = write_number(to, all ? UINT32_MAX : (uint64_t)group->used, 4);
        to = write_number(to, (uint64_t)(group->used * group->row_bytes), 8);
        for (Py_ssize_t row = 0; !all && row < group->used; row++)
            to = write_number(to, group->rows[row], 4);
        const char *from = group->values;
        for (Py_ssize_t key = 0; key < group->keys; key++) {
            Py_ssize_t bytes = group->items[key].template.len;
            for (Py_ssize_t row = 0; row < group->used; row++, to += bytes)
                memcpy(to, from + row * group->row_bytes, (size_t)bytes);
            from += bytes;
        }
    }
    return payload;
}
