/* What the files of `_c` have in common; what its functions take and give is in _c.pyi.
 *
 * Each function does the usual case of what some Python does, on the same objects, and says where it stopped; Python
 * does the rest. So there is one place that knows every case and says what is wrong, and whether there was a compiler
 * shows in nothing but time. */

#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#include "shared.h"

/* ------------------------------------------------------------ objects of Python */

extern PyObject *zlib_crc32, *numpy_array, *numpy_zeros, *numpy_scalar, *numpy_bool, *numpy_integer, *numpy_floating;
extern PyObject *float64_dtype, *int64_dtype, *bool_dtype, *tuple_new;

#define DECLARE(name) extern PyObject *str_##name;
NAMES(DECLARE)
#undef DECLARE

/* References to what was looked at. What could not be got is NULL, with an exception, and so is all that is asked after
 * that. */
enum { MAX_HELD = 24 };
typedef struct {
    int count;
    PyObject *objects[MAX_HELD];
} Held;

/* Takes a new reference, which may be NULL; an exception if there is no room. */
PyObject *hold(Held *held, PyObject *object);

PyObject *look_up(Held *held, PyObject *of, PyObject *name);
void let_go(Held *held);

/* A number of 32 bits; -1 if it is none, without an exception. */
int as_word(PyObject *object, uint32_t *number);
int set_word(PyObject *of, PyObject *name, uint32_t number);

/* ------------------------------------------------------------ crc.c */

int set_up_crc(void); /* whether it is faster than zlib's */
int add_to_crc(const void *bytes, Py_ssize_t count, uint32_t *crc);

PyObject *crc_of(PyObject *module, PyObject *const *args, Py_ssize_t argc);

/* ------------------------------------------------------------ frames.c */

enum { MAX_BUFFERS = 128 };

uint32_t word_at(const uint8_t *from);

/* The buffers of Python objects, while they are read or written. */
typedef struct {
    int count;
    Py_buffer views[MAX_BUFFERS];
    struct iovec parts[MAX_BUFFERS + 1]; /* a header may come before the others */
} Buffers;

int add_buffer(Buffers *buffers, PyObject *object, int flags);
void release_buffers(Buffers *buffers);

/* Puts a header before buffers whose CRC and sizes these are, and makes `chain` its CRC. */
int put_head_before(Buffers *buffers, uint8_t *head, uint32_t kind, uint32_t request, uint32_t generation,
                    Py_ssize_t size, Py_ssize_t tail, uint32_t body, uint32_t *chain);

/* Whether what was read into a header's buffer, a guess, and the spill begins with one whole frame, in order, whose
 * fixed part fills the guess, and how many bytes come after it; -1: exception. Whether it is that, without a tail. */
int begins_whole(Py_ssize_t count, uint32_t chain, const Buffers *buffers, Py_ssize_t *more);
int is_whole(Py_ssize_t count, uint32_t chain, const Buffers *buffers);
uint32_t tail_size(const Buffers *buffers);

/* Likewise of one whose fixed part fills so much of the guess and whose tail is elsewhere, as to its CRCs. */
int is_in_order(uint32_t chain, const Buffers *buffers, Py_ssize_t size, const uint8_t *tail, Py_ssize_t tail_bytes);

/* Likewise of one whose body, so many bytes, lies in one place. */
int is_sound(uint32_t chain, const uint8_t *head, const uint8_t *body, Py_ssize_t size);

/* Makes ready to read a frame whose fixed part goes into these buffers, a list, if the decoder is between two frames:
 * 1, and the CRC of the frame before; 0 if it is not, or there are too many; -1: exception. */
int offer(Held *held, PyObject *decoder, PyObject *into, Buffers *buffers, uint32_t *chain);

int spin_on(int fd, double seconds);

PyObject *write_frame(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *read_frame(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *spin(PyObject *module, PyObject *const *args, Py_ssize_t argc);

/* ------------------------------------------------------------ infos.c */

enum { MAX_GROUPS = 8, MAX_KEYS = 64 };

typedef struct InfoItem InfoItem;

/* Infos of one sort: `used` rows of values, one after the other, and their numbers. */
typedef struct {
    PyObject *sort;
    Py_ssize_t used, keys, row_bytes;
    char *values;
    uint32_t *rows;
    InfoItem *items; /* one a key */
} InfoGroup;

/* Those of a step of so many rows, by sort; the last row of them. Of no sorts (NULL), none is taken. */
typedef struct {
    PyObject *sorts;
    Py_ssize_t rows, last;
    int count;
    InfoGroup groups[MAX_GROUPS];
} Columns;

int note_columns(Columns *columns, PyObject *info, Py_ssize_t row); /* 1; 0 if it is of no known sort */
int take_back(Columns *columns, PyObject *infos);                   /* as rows and dicts; none is taken any more */
PyObject *tail_of(const Columns *columns);                          /* as `wire.messages.dump_columns` makes it */
void end_columns(Columns *columns);

/* ------------------------------------------------------------ columns.c, merge.c */

int is_tuple_of(PyObject *object, Py_ssize_t size);
int is_schema(PyObject *object); /* and not merged by row alone */
int is_of_floats(PyObject *schema);

/* The memory of an array with so many axes of 8-byte numbers of one of these formats; 0 if it is none. */
int view_numbers(PyObject *array, int axes, const char *formats, Py_buffer *view);
int64_t number_in(const Py_buffer *view, Py_ssize_t index);

/* A new array, and its memory. */
PyObject *zeros(PyObject *shape, PyObject *dtype, Py_buffer *view);

PyObject *read_columns(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *merge_columns(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *within(PyObject *module, PyObject *const *args, Py_ssize_t argc);

/* ------------------------------------------------------------ rows.c */

/* What it takes to step envs, whose first row has the first action: see `step_rows`. */
typedef struct {
    Py_ssize_t first;
    PyObject *actions, *steps, *resets, *due, *seeds, *mark, *infos, *into;
    Columns *columns; /* take infos before the list does, if they can; NULL: the list gets all */
    long at_end;
} Stepping;

/* What came of that: the row that was not usual, or the one after the last. */
typedef struct {
    Py_ssize_t row;
    PyObject *outcome; /* a new reference; NULL: none */
    int odd;
} Stopped;

int step_from(Py_ssize_t row, const Stepping *stepping, Stopped *stopped);
PyObject *caught(void); /* the exception that is set, as an object */
PyObject *step_rows(PyObject *module, PyObject *const *args, Py_ssize_t argc);

/* ------------------------------------------------------------ parent.c, worker.c */

PyObject *send_express(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *take_express(PyObject *module, PyObject *channel);
PyObject *serve_express(PyObject *module, PyObject *const *args, Py_ssize_t argc);
