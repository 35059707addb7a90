/* Info dicts as columns, where all values are numbers, or arrays of the same dtypes and shapes each time: see
 * spaces/infos.py and ipc/messages.py. */

#include "c.h"

/* What a `Gatherer` knows of a sort of dict. */

/* How a value is copied: as a number of Python's, or as whatever lies in its memory. */
enum { A_FLOAT, AN_INT, A_BOOL, MEMORY };

struct InfoItem {
    int how;
    Py_buffer like; /* what its column's values look like */
};

/* So much a worker's infos of one sort may take; what there is of larger ones is left to Python. */
static const Py_ssize_t MAX_GROUP_BYTES = (Py_ssize_t)1 << 26;

static PyObject *part_of(PyObject *sort, int part) { return PyTuple_GET_ITEM(sort, part); }

static Py_ssize_t keys_of(PyObject *sort) { return PyList_GET_SIZE(part_of(sort, KNOWN_KEYS)); }

static int is_sort(PyObject *sort) {
    uint32_t number;
    if (!PyTuple_Check(sort) || PyTuple_GET_SIZE(sort) != KNOWN_FIELDS || as_word(part_of(sort, KNOWN_SCHEMA_ID), &number))
        return 0;
    for (int part = KNOWN_KEYS; part <= KNOWN_TEMPLATES; part++)
        if (!PyList_CheckExact(part_of(sort, part)) || PyList_GET_SIZE(part_of(sort, part)) != keys_of(sort))
            return 0;
    return keys_of(sort) <= MAX_KEYS;
}

/* Whether a dict has the keys of a sort, in its order, and the types of its values. */
static int has_types(PyObject *sort, PyObject *info) {
    PyObject *keys = part_of(sort, KNOWN_KEYS), *types = part_of(sort, KNOWN_TYPES), *key, *value;
    if (keys_of(sort) != PyDict_GET_SIZE(info) || PyList_GET_SIZE(types) != keys_of(sort))
        return 0;
    for (Py_ssize_t place = 0, i = 0; PyDict_Next(info, &place, &key, &value); i++) {
        PyObject *known = PyList_GET_ITEM(keys, i);
        int texts = PyUnicode_CheckExact(key) && PyUnicode_CheckExact(known);
        if (key != known && (!texts || PyUnicode_Compare(key, known)))
            return 0;
        if ((PyObject *)Py_TYPE(value) != PyList_GET_ITEM(types, i))
            return 0;
    }
    return 1;
}

/* Copies what lies in the memory of a value, if that looks as it should. */
static int copy_memory(PyObject *value, const Py_buffer *like, char *to) {
    Py_buffer from;
    if (PyObject_GetBuffer(value, &from, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 0;
    }
    int same = from.len == like->len && from.ndim == like->ndim && !strcmp(from.format, like->format);
    for (int axis = 0; same && axis < like->ndim; axis++)
        same = from.shape[axis] == like->shape[axis];
    if (same)
        memcpy(to, from.buf, (size_t)from.len);
    PyBuffer_Release(&from);
    return same;
}

static int copy_value(PyObject *value, const InfoItem *item, char *to) {
    if (item->how == MEMORY)
        return copy_memory(value, &item->like, to);
    double number = item->how == A_FLOAT ? PyFloat_AsDouble(value) : 0;
    long long whole = item->how == AN_INT ? PyLong_AsLongLong(value) : 0;
    if ((number == -1 || whole == -1) && PyErr_Occurred()) { /* too large, say */
        PyErr_Clear();
        return 0;
    }
    if (item->how == A_BOOL)
        *to = value == Py_True;
    else
        memcpy(to, item->how == A_FLOAT ? (void *)&number : (void *)&whole, 8);
    return 1;
}

/* Adds a dict to a group; 0 if it does not fit. */
static int add_row(Columns *columns, InfoGroup *group, PyObject *info, Py_ssize_t row) {
    PyObject *key, *value;
    if (!has_types(group->sort, info))
        return 0;
    char *to = group->values + group->used * group->row_bytes;
    for (Py_ssize_t place = 0, i = 0; i < group->keys && PyDict_Next(info, &place, &key, &value); i++) {
        if (!copy_value(value, &group->items[i], to))
            return 0;
        to += group->items[i].like.len;
    }
    group->rows[group->used++] = (uint32_t)row;
    columns->last = row;
    return 1;
}

static void end_group(InfoGroup *group) {
    for (Py_ssize_t i = 0; group->items != NULL && i < group->keys; i++)
        PyBuffer_Release(&group->items[i].like);
    PyMem_Free(group->items);
    PyMem_Free(group->values);
    PyMem_Free(group->rows);
    Py_DECREF(group->sort);
}

/* How values of a type are copied that look like that. */
static int how_to_copy(PyObject *type, const Py_buffer *like) {
    const char *format = like->format;
    if (like->ndim || !format[0] || format[1])
        return MEMORY;
    if (type == (PyObject *)&PyLong_Type)
        return strchr("lq", format[0]) != NULL && like->len == 8 ? AN_INT : -1;
    if (type == (PyObject *)&PyBool_Type)
        return format[0] == '?' ? A_BOOL : -1;
    if (format[0] == 'd') /* narrower ones, too, in a table */
        return A_FLOAT;
    return type == (PyObject *)&PyFloat_Type ? -1 : MEMORY;
}

/* Begins a group; 0 if it is none that can be taken here. */
static int begin_group(InfoGroup *group, PyObject *sort, Py_ssize_t rows) {
    *group = (InfoGroup){.sort = Py_NewRef(sort)};
    Py_ssize_t keys = keys_of(sort);
    group->items = PyMem_Malloc((size_t)(keys + 1) * sizeof *group->items);
    int takes = group->items != NULL;
    while (takes && group->keys < keys) {
        InfoItem *item = &group->items[group->keys];
        PyObject *like = PyList_GET_ITEM(part_of(sort, KNOWN_TEMPLATES), group->keys);
        takes = Py_TYPE(like) == (PyTypeObject *)numpy_array &&
                PyObject_GetBuffer(like, &item->like, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0;
        if (!takes)
            break;
        group->keys++;
        group->row_bytes += item->like.len;
        item->how = how_to_copy(PyList_GET_ITEM(part_of(sort, KNOWN_TYPES), group->keys - 1), &item->like);
        takes = item->how >= 0 && group->row_bytes <= MAX_GROUP_BYTES / (rows + 1);
    }
    PyErr_Clear();
    if (takes) {
        group->values = PyMem_Malloc((size_t)(rows * group->row_bytes) + 1);
        group->rows = PyMem_Malloc((size_t)rows * sizeof *group->rows);
    }
    if (group->values != NULL && group->rows != NULL)
        return 1;
    end_group(group);
    return 0;
}

int note_columns(Columns *columns, PyObject *info, Py_ssize_t row) {
    if (row <= columns->last) /* each row once, and in order */
        return 0;
    for (int i = 0; i < columns->count; i++)
        if (add_row(columns, &columns->groups[i], info, row))
            return 1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(columns->sorts) && columns->count < MAX_GROUPS; i++) {
        PyObject *sort = PyList_GET_ITEM(columns->sorts, i);
        InfoGroup *group = &columns->groups[columns->count];
        if (!is_sort(sort) || !has_types(sort, info) || !begin_group(group, sort, columns->rows))
            continue;
        if (add_row(columns, group, info, row)) {
            columns->count++;
            return 1;
        }
        end_group(group);
    }
    return 0;
}

/* The dict that a row of a group was: an equal one. */
static PyObject *dict_of(const InfoGroup *group, Py_ssize_t index) {
    const char *from = group->values + index * group->row_bytes;
    PyObject *bytes = PyBytes_FromStringAndSize(from, group->row_bytes);
    PyObject *info = bytes == NULL ? NULL : PyObject_CallOneArg(part_of(group->sort, KNOWN_MAKE_INFO), bytes);
    Py_XDECREF(bytes);
    return info;
}

int take_back(Columns *columns, PyObject *infos) {
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
    end_columns(columns);
    columns->sorts = NULL;
    return 0;
}

void end_columns(Columns *columns) {
    while (columns->count)
        end_group(&columns->groups[--columns->count]);
}

static char *put_number(char *to, uint64_t number, int bytes) {
    for (int i = 0; i < bytes; i++)
        *to++ = (char)(number >> 8 * i);
    return to;
}

PyObject *tail_of(const Columns *columns) {
    Py_ssize_t size = columns->count ? 1 + 4 : 0;
    for (int i = 0; i < columns->count; i++) {
        const InfoGroup *group = &columns->groups[i];
        size += 4 + 4 + 8 + group->used * group->row_bytes;
        size += group->used < columns->rows ? 4 * group->used : 0;
    }
    PyObject *tail = PyBytes_FromStringAndSize(NULL, size);
    if (tail == NULL || !size)
        return tail;
    char *to = PyBytes_AS_STRING(tail);
    *to++ = COLUMNS_TAG;
    to = put_number(to, (uint64_t)columns->count, 4);
    for (int i = 0; i < columns->count; i++) {
        const InfoGroup *group = &columns->groups[i];
        int all = group->used == columns->rows;
        uint32_t number = 0;
        as_word(part_of(group->sort, KNOWN_SCHEMA_ID), &number);
        to = put_number(to, number, 4);
        to = put_number(to, all ? UINT32_MAX : (uint64_t)group->used, 4);
        to = put_number(to, (uint64_t)(group->used * group->row_bytes), 8);
        for (Py_ssize_t row = 0; !all && row < group->used; row++)
            to = put_number(to, group->rows[row], 4);
        const char *from = group->values;
        for (Py_ssize_t key = 0; key < group->keys; key++) {
            Py_ssize_t bytes = group->items[key].like.len;
            for (Py_ssize_t row = 0; row < group->used; row++, to += bytes)
                memcpy(to, from + row * group->row_bytes, (size_t)bytes);
            from += bytes;
        }
    }
    return tail;
}
