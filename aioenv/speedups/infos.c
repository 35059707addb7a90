/* Info dicts as columns, where all that they say is float scalars: see batching/gather.py and wire/messages.py. */

#include "c.h"

/* What a `Gatherer` knows of a sort of dict. */
enum { NUMBER, KEYS, TYPES, PARTS };

static Py_ssize_t keys_of(PyObject *sort) { return PyList_GET_SIZE(PyTuple_GET_ITEM(sort, KEYS)); }

static int is_sort(PyObject *sort) {
    uint32_t number;
    return PyTuple_Check(sort) && PyTuple_GET_SIZE(sort) == PARTS && PyList_CheckExact(PyTuple_GET_ITEM(sort, KEYS)) &&
           PyList_CheckExact(PyTuple_GET_ITEM(sort, TYPES)) && !as_word(PyTuple_GET_ITEM(sort, NUMBER), &number) &&
           PyList_GET_SIZE(PyTuple_GET_ITEM(sort, TYPES)) == keys_of(sort) && keys_of(sort) <= MAX_KEYS;
}

/* Whether a dict is of a sort; its values. */
static int fits(PyObject *sort, PyObject *info, double *values) {
    PyObject *keys = PyTuple_GET_ITEM(sort, KEYS), *types = PyTuple_GET_ITEM(sort, TYPES), *key, *value;
    if (keys_of(sort) != PyDict_GET_SIZE(info))
        return 0;
    for (Py_ssize_t place = 0, i = 0; PyDict_Next(info, &place, &key, &value); i++) {
        if (i >= keys_of(sort) || i >= PyList_GET_SIZE(types) || i >= MAX_KEYS) /* a conversion may run Python */
            return 0;
        PyObject *known = PyList_GET_ITEM(keys, i);
        int texts = PyUnicode_CheckExact(key) && PyUnicode_CheckExact(known);
        if (key != known && (!texts || PyUnicode_Compare(key, known)))
            return 0;
        if ((PyObject *)Py_TYPE(value) != PyList_GET_ITEM(types, i))
            return 0;
        values[i] = PyFloat_AsDouble(value);
        if (values[i] == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

static int add_row(Columns *columns, InfoGroup *group, const double *values, Py_ssize_t row) {
    memcpy(group->values + group->used * keys_of(group->sort), values, (size_t)keys_of(group->sort) * sizeof *values);
    group->rows[group->used++] = (uint32_t)row;
    columns->last = row;
    return 1;
}

int note_columns(Columns *columns, PyObject *info, Py_ssize_t row) {
    double values[MAX_KEYS];
    if (row <= columns->last) /* each row once, and in order */
        return 0;
    for (int i = 0; i < columns->count; i++)
        if (fits(columns->groups[i].sort, info, values))
            return add_row(columns, &columns->groups[i], values, row);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(columns->sorts); i++) {
        PyObject *sort = PyList_GET_ITEM(columns->sorts, i);
        if (!is_sort(sort) || !fits(sort, info, values))
            continue;
        InfoGroup group = {.sort = sort};
        group.values = PyMem_Malloc((size_t)(columns->rows * keys_of(sort)) * sizeof *values);
        group.rows = PyMem_Malloc((size_t)columns->rows * sizeof *group.rows);
        if (columns->count == MAX_GROUPS || group.values == NULL || group.rows == NULL) {
            PyMem_Free(group.values);
            PyMem_Free(group.rows);
            return 0;
        }
        Py_INCREF(sort);
        columns->groups[columns->count] = group;
        return add_row(columns, &columns->groups[columns->count++], values, row);
    }
    return 0;
}

/* The dict that a row of a group was. */
static PyObject *dict_of(const InfoGroup *group, Py_ssize_t index) {
    PyObject *info = PyDict_New();
    for (Py_ssize_t i = 0; info != NULL && i < keys_of(group->sort); i++) {
        PyObject *number = PyFloat_FromDouble(group->values[index * keys_of(group->sort) + i]);
        PyObject *type = PyList_GET_ITEM(PyTuple_GET_ITEM(group->sort, TYPES), i);
        PyObject *value = number == NULL ? NULL : PyObject_CallOneArg(type, number);
        if (value == NULL || PyDict_SetItem(info, PyList_GET_ITEM(PyTuple_GET_ITEM(group->sort, KEYS), i), value) < 0)
            Py_CLEAR(info);
        Py_XDECREF(number);
        Py_XDECREF(value);
    }
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
    for (int i = 0; i < columns->count; i++) {
        Py_DECREF(columns->groups[i].sort);
        PyMem_Free(columns->groups[i].values);
        PyMem_Free(columns->groups[i].rows);
    }
    columns->count = 0;
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
        size += 4 + 4 + 8 + 8 * group->used * keys_of(group->sort);
        size += group->used < columns->rows ? 4 * group->used : 0;
    }
    PyObject *tail = PyBytes_FromStringAndSize(NULL, size);
    if (tail == NULL || !size)
        return tail;
    char *to = PyBytes_AS_STRING(tail);
    *to++ = 'I';
    to = put_number(to, (uint64_t)columns->count, 4);
    for (int i = 0; i < columns->count; i++) {
        const InfoGroup *group = &columns->groups[i];
        Py_ssize_t keys = keys_of(group->sort);
        int all = group->used == columns->rows;
        uint32_t number = 0;
        as_word(PyTuple_GET_ITEM(group->sort, NUMBER), &number);
        to = put_number(to, number, 4);
        to = put_number(to, all ? UINT32_MAX : (uint64_t)group->used, 4);
        to = put_number(to, (uint64_t)(8 * group->used * keys), 8);
        for (Py_ssize_t row = 0; !all && row < group->used; row++)
            to = put_number(to, group->rows[row], 4);
        for (Py_ssize_t key = 0; key < keys; key++)
            for (Py_ssize_t row = 0; row < group->used; row++, to += sizeof(double))
                memcpy(to, &group->values[row * keys + key], sizeof(double));
    }
    return tail;
}
