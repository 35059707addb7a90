/* Declarations that the files of `_c` share. `_c.pyi` documents the functions that Python calls.
 *
 * Each of these functions does the common case of a Python function, on the same objects, and returns where it
 * stopped. Python does the rest. So all special cases and error messages exist once, in Python, and the extension
 * changes nothing but speed. */

#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#include "shared.h"

/* ------------------------------------------------------------ Python objects */

extern PyObject *zlib_crc32, *numpy_array, *numpy_zeros, *numpy_scalar, *numpy_bool, *numpy_integer, *numpy_floating;
extern PyObject *float64_dtype, *int64_dtype, *bool_dtype, *tuple_new;

#define DECLARE(name) extern PyObject *str_##name;
NAMES(DECLARE)
#undef DECLARE

/* References that a function owns until it returns. A failed lookup gives NULL with an exception set, and all later
 * lookups then give NULL, too. */
enum { MAX_REFERENCES = 24 };
typedef struct {
    int count;
    PyObject *objects[MAX_REFERENCES];
} References;

/* Add a new reference, which may be NULL. If there is no room, set an exception and return NULL. */
PyObject *add_reference(References *refs, PyObject *object);

PyObject *look_up(References *refs, PyObject *object, PyObject *name);
void release_references(References *refs);

/* Read an unsigned 32-bit number. Return -1, without an exception, if the object is none. */
int as_uint32(PyObject *object, uint32_t *number);
int set_uint32(PyObject *object, PyObject *name, uint32_t number);

/* ------------------------------------------------------------ crc.c */

int set_up_crc(void); /* 1 if it is faster than zlib's */
int add_to_crc(const void *bytes, Py_ssize_t count, uint32_t *crc);

PyObject *crc32_of(PyObject *module, PyObject *const *args, Py_ssize_t argc);

/* ------------------------------------------------------------ frames.c */

enum { MAX_BUFFERS = 128 };

uint32_t read_uint32(const uint8_t *from);

/* The buffers of Python objects, while they are read or written. */
typedef struct {
    int count;
    Py_buffer views[MAX_BUFFERS];
    struct iovec parts[MAX_BUFFERS + 1]; /* one more, for a header before the others */
} Buffers;

int add_buffer(Buffers *buffers, PyObject *object, int flags);
void release_buffers(Buffers *buffers);

/* Put a header before the buffers, which have this CRC and these sizes, and set `chain` to the header's CRC. */
int prepend_header(Buffers *buffers, uint8_t *head, uint32_t kind, uint32_t request, uint32_t generation,
                   Py_ssize_t size, Py_ssize_t payload, uint32_t body, uint32_t *chain);

/* The first bytes of a frame's fixed part, and their CRC. */
typedef struct {
    Py_ssize_t count;
    uint32_t crc;
} CheckedBytes;

/* Read from a descriptor that does not block. The buffers are those of the header, of the predicted fixed part, and
 * the spill. A large frame may take several reads, between which CRCs are computed. Return as `readv`; -2: exception. */
ssize_t read_in_pieces(int fd, const Buffers *buffers, CheckedBytes *checked);

/* Return whether a read of `count` bytes into such buffers starts with one whole frame that is in order; -1:
 * exception. The frame's fixed part must fill the predicted buffers. `checked`, or NULL, spares computing its CRC
 * again. `more` becomes the number of bytes after the frame. `is_one_frame` allows neither such bytes nor a payload. */
int starts_with_frame(Py_ssize_t count, uint32_t chain, const Buffers *buffers, const CheckedBytes *checked,
                      Py_ssize_t *more);
int is_one_frame(Py_ssize_t count, uint32_t chain, const Buffers *buffers);
uint32_t payload_size(const Buffers *buffers);

/* Return whether the CRCs match of a frame whose fixed part fills `size` bytes of the predicted buffers and whose
 * payload is elsewhere; -1: exception. */
int crcs_match(uint32_t chain, const Buffers *buffers, Py_ssize_t size, const uint8_t *payload,
               Py_ssize_t payload_bytes);

/* Return whether the CRCs match of a frame whose body is `size` contiguous bytes; -1: exception. */
int contiguous_crcs_match(uint32_t chain, const uint8_t *head, const uint8_t *body, Py_ssize_t size);

/* Prepare to read a frame whose fixed part goes into the buffers of the list `into`. Return 1 and the CRC of the
 * previous header if the decoder is between two frames. Return 0 if it is not, or if there are too many buffers; -1:
 * exception. */
int prepare_read(References *refs, PyObject *decoder, PyObject *into, Buffers *buffers, uint32_t *chain);

int spin_until_readable(int fd, double seconds);

PyObject *write_frame(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *read_frame(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *spin(PyObject *module, PyObject *const *args, Py_ssize_t argc);

/* ------------------------------------------------------------ infos.c */

enum { MAX_GROUPS = 8, MAX_KEYS = 64 };

typedef struct InfoItem InfoItem;

/* Infos of one schema: `used` rows of values, one after the other, and their row numbers. */
typedef struct {
    PyObject *schema;
    Py_ssize_t used, keys, row_bytes;
    char *values;
    uint32_t *rows;
    InfoItem *items; /* one per key */
} InfoGroup;

/* The infos of a step of `rows` rows, by schema, and the last row that has one. If `schemas` is NULL, no info is
 * added. */
typedef struct {
    PyObject *schemas;
    Py_ssize_t rows, last;
    int count;
    InfoGroup groups[MAX_GROUPS];
} Columns;

int add_info(Columns *columns, PyObject *info, Py_ssize_t row); /* 1; 0 if it has no known schema */
int restore_infos(Columns *columns, PyObject *infos);           /* append (row, dict) to `infos`; add none later */
PyObject *columns_payload(const Columns *columns);              /* as `ipc.messages.dump_columns` makes it */
void free_columns(Columns *columns);

/* ------------------------------------------------------------ columns.c, merge.c */

int is_tuple_of_size(PyObject *object, Py_ssize_t size);
int is_schema(PyObject *object); /* and not one merged by row only */
int has_float_table(PyObject *schema);

/* View the memory of a contiguous array of `axes` axes and 8-byte numbers of one of these formats. Return 0 if it is
 * another object. */
int view_numbers(PyObject *array, int axes, const char *formats, Py_buffer *view);
int64_t int64_at(const Py_buffer *view, Py_ssize_t index);

/* Make an array of zeros and view its memory. */
PyObject *zeros(PyObject *shape, PyObject *dtype, Py_buffer *view);

PyObject *read_columns(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *merge_columns(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *within(PyObject *module, PyObject *const *args, Py_ssize_t argc);

/* ------------------------------------------------------------ rows.c */

/* The arguments of `step_rows`. The first action is for row `first`. */
typedef struct {
    Py_ssize_t first;
    PyObject *actions, *steps, *resets, *pending_rows, *seeds, *current_row, *infos, *outputs;
    Columns *columns; /* collects infos that have a known schema; NULL: `infos` gets all */
    long at_end;
} Stepping;

/* Where stepping stopped: the first row that is left to Python, or the one after the last. */
typedef struct {
    Py_ssize_t row;
    PyObject *outcome;   /* a new reference, or NULL */
    PyObject *last_step; /* likewise; if the outcome is that of the reset after it */
    int nonstandard;
} StopPoint;

int check_array_fields(PyObject *array); /* -1: exception */
int step_from(Py_ssize_t row, const Stepping *stepping, StopPoint *stopped);
PyObject *take_exception(void); /* return and clear the current exception */
PyObject *step_rows(PyObject *module, PyObject *const *args, Py_ssize_t argc);

/* ------------------------------------------------------------ parent.c, worker.c */

PyObject *send_steps(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *take_replies(PyObject *module, PyObject *channel);
PyObject *serve_steps(PyObject *module, PyObject *const *args, Py_ssize_t argc);
PyObject *step_here(PyObject *module, PyObject *const *args, Py_ssize_t argc);

/* ------------------------------------------------------------ wrapped_steps.c */

PyObject *step_below(PyObject *module, PyObject *const *args, Py_ssize_t argc);
