/* Make system calls below a folder fail, be short or be slow, and move the clock.

   Loaded with LD_PRELOAD; sleeps until a control file, which several processes share, says
   otherwise. Only calls on paths that begin with the control's prefix count. Built by shim.py. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, LINK = 4, RENAME = 8, OPEN = 16, MKDIR = 32, READ = 64, UNLINK = 128 };
enum { ANY = 0, TRAINER = 1, FLUSHER = 2 };
enum { FAIL = 1, SHORT = 2, SLOW = 3 };

/* The same fields in the same order as in shim.py. */
struct control {
    int32_t armed, ops, whose, trainer, from, count, error, mode, delay_us;
    int32_t calls, fired;
    int32_t pad;
    int64_t clock_offset_s;
    char prefix[PATH_MAX];
};

static struct control *shared;

int laststep_shim_use(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return errno;
    void *at = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return errno;
    shared = at;
    return 0;
}

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("LASTSTEP_SHIM_CONTROL");
    if (path != NULL)
        laststep_shim_use(path);
}

static int is_below(const char *path)
{
    return strncmp(path, shared->prefix, strlen(shared->prefix)) == 0;
}

static int is_open_below(int fd)
{
    char name[40], path[PATH_MAX];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(name, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return is_below(path);
}

/* Whether this call is one that is to go wrong; a slow one has been slow already. */
static int strikes(int op, const char *path, int fd)
{
    if (shared == NULL || !shared->armed || !(shared->ops & op))
        return 0;
    if (shared->whose != ANY && (getpid() == shared->trainer) != (shared->whose == TRAINER))
        return 0;
    int before = errno;
    int below = path != NULL ? is_below(path) : is_open_below(fd);
    errno = before;
    if (!below)
        return 0;
    int number = __atomic_add_fetch(&shared->calls, 1, __ATOMIC_SEQ_CST);
    if (number < shared->from || (shared->count >= 0 && number >= shared->from + shared->count))
        return 0;
    if (shared->mode == SHORT && op != WRITE && op != READ)
        return 0;
    __atomic_add_fetch(&shared->fired, 1, __ATOMIC_SEQ_CST);
    if (shared->mode == SLOW) {
        usleep(shared->delay_us);
        return 0;
    }
    errno = shared->error;
    return shared->mode;
}

/* Half of it, whole pages where it has some: direct I/O knows no other. */
static size_t half(size_t size)
{
    return size >= 8192 ? (size / 2) & ~(size_t)4095 : (size + 1) / 2;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) \
        real = dlsym(RTLD_NEXT, #name)

#define MOVE_BYTES(op, name, parameters, call, call_half, fd) \
    ssize_t name parameters \
    { \
        REAL(name); \
        int how = strikes(op, NULL, fd); \
        if (how == FAIL) \
            return -1; \
        return how == SHORT ? real call_half : real call; \
    }

MOVE_BYTES(WRITE, write, (int fd, const void *data, size_t size), (fd, data, size),
           (fd, data, half(size)), fd)
MOVE_BYTES(WRITE, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at),
           (fd, data, half(size), at), fd)
MOVE_BYTES(WRITE, pwrite64, (int fd, const void *data, size_t size, off64_t at),
           (fd, data, size, at), (fd, data, half(size), at), fd)
MOVE_BYTES(READ, read, (int fd, void *data, size_t size), (fd, data, size), (fd, data, half(size)),
           fd)
MOVE_BYTES(READ, pread, (int fd, void *data, size_t size, off_t at), (fd, data, size, at),
           (fd, data, half(size), at), fd)
MOVE_BYTES(READ, pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at),
           (fd, data, half(size), at), fd)

#define READ_PARTS(name, parameters, call, call_half) \
    ssize_t name parameters \
    { \
        REAL(name); \
        int how = strikes(READ, NULL, fd); \
        if (how == FAIL) \
            return -1; \
        struct iovec first = {parts[0].iov_base, half(parts[0].iov_len)}; \
        return how == SHORT ? real call_half : real call; \
    }

READ_PARTS(preadv, (int fd, const struct iovec *parts, int count, off_t at),
           (fd, parts, count, at), (fd, &first, 1, at))
READ_PARTS(preadv64, (int fd, const struct iovec *parts, int count, off64_t at),
           (fd, parts, count, at), (fd, &first, 1, at))
READ_PARTS(preadv2, (int fd, const struct iovec *parts, int count, off_t at, int flags),
           (fd, parts, count, at, flags), (fd, &first, 1, at, flags))
READ_PARTS(preadv64v2, (int fd, const struct iovec *parts, int count, off64_t at, int flags),
           (fd, parts, count, at, flags), (fd, &first, 1, at, flags))

#define WITH_PATH(op, name, parameters, call, path) \
    int name parameters \
    { \
        REAL(name); \
        return strikes(op, path, -1) ? -1 : real call; \
    }

#define WITH_FILE(op, name) \
    int name(int fd) \
    { \
        REAL(name); \
        return strikes(op, NULL, fd) ? -1 : real(fd); \
    }

WITH_FILE(SYNC, fsync)
WITH_FILE(SYNC, fdatasync)
WITH_PATH(LINK, link, (const char *old, const char *new), (old, new), new)
WITH_PATH(LINK, linkat, (int a, const char *old, int b, const char *new, int flags),
          (a, old, b, new, flags), new)
WITH_PATH(RENAME, rename, (const char *old, const char *new), (old, new), new)
WITH_PATH(RENAME, renameat2, (int a, const char *old, int b, const char *new, unsigned flags),
          (a, old, b, new, flags), new)
WITH_PATH(MKDIR, mkdir, (const char *path, mode_t mode), (path, mode), path)
WITH_PATH(UNLINK, unlink, (const char *path), (path), path)
WITH_PATH(UNLINK, rmdir, (const char *path), (path), path)

#define OPENING(name, before, names, path) \
    int name(before int flags, ...) \
    { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        return strikes(OPEN, path, -1) ? -1 : real(names flags, mode); \
    }

#define COMMA ,
OPENING(open, const char *path COMMA, path COMMA, path)
OPENING(open64, const char *path COMMA, path COMMA, path)
OPENING(openat, int at COMMA const char *path COMMA, at COMMA path COMMA, path)
OPENING(openat64, int at COMMA const char *path COMMA, at COMMA path COMMA, path)

int clock_gettime(clockid_t which, struct timespec *now)
{
    REAL(clock_gettime);
    int status = real(which, now);
    if (status == 0 && shared != NULL && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        now->tv_sec += shared->clock_offset_s;
    return status;
}

time_t time(time_t *where)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where != NULL)
        *where = now.tv_sec;
    return now.tv_sec;
}
