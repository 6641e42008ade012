/* What a disk or a clock may do to the processes that preload this, as a control file says.

   SUITE_SHIM_CONTROL names the file, three 64-bit numbers that another process writes at any time:
   seconds by which the wall clock of Python is off; whether fsync fails; whether files below
   SUITE_SHIM_BELOW can be written. Without the file nothing changes. benchmarks/shim.py builds it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct control {
    volatile int64_t clock_s;
    volatile int64_t fsync_fails;
    volatile int64_t read_only;
};

static const struct control calm;
static const struct control *control = &calm;
static const char *below;

/* The function that this file's own hides. */
#define REAL(name)                       \
    static __typeof__(&name) real;       \
    if (real == NULL)                    \
    real = dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("SUITE_SHIM_CONTROL");
    below = getenv("SUITE_SHIM_BELOW");
    if (path == NULL || below == NULL)
        return;
    /* A copy: a process that sets its title (PostgreSQL, Ray) writes over its environment, and every
       path is below an empty text. */
    below = strdup(below);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    /* Mapped, so that a look at it costs no system call. */
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        control = mapped;
}

static int is_below(const char *path)
{
    return below != NULL && path != NULL && strncmp(path, below, strlen(below)) == 0;
}

static int refused(const char *path)
{
    if (!control->read_only || !is_below(path))
        return 0;
    errno = EROFS;
    return 1;
}

#define WRITES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)

/* The mode is there where a file may be made, and is read for nothing elsewhere. */
#define OPEN(name)                                        \
    int name(const char *path, int flags, ...)            \
    {                                                     \
        REAL(name);                                       \
        va_list more;                                     \
        va_start(more, flags);                            \
        mode_t mode = va_arg(more, mode_t);               \
        va_end(more);                                     \
        if ((flags & WRITES) && refused(path))            \
            return -1;                                    \
        return real(path, flags, mode);                   \
    }

#define OPEN_AT(name)                                     \
    int name(int folder, const char *path, int flags, ...) \
    {                                                     \
        REAL(name);                                       \
        va_list more;                                     \
        va_start(more, flags);                            \
        mode_t mode = va_arg(more, mode_t);               \
        va_end(more);                                     \
        if ((flags & WRITES) && refused(path))            \
            return -1;                                    \
        return real(folder, path, flags, mode);           \
    }

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)

int mkdir(const char *path, mode_t mode)
{
    REAL(mkdir);
    return refused(path) ? -1 : real(path, mode);
}

int rmdir(const char *path)
{
    REAL(rmdir);
    return refused(path) ? -1 : real(path);
}

int unlink(const char *path)
{
    REAL(unlink);
    return refused(path) ? -1 : real(path);
}

int rename(const char *from, const char *to)
{
    REAL(rename);
    return refused(to) ? -1 : real(from, to);
}

static int sync_fails(int file)
{
    if (!control->fsync_fails)
        return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    if (!is_below(path))
        return 0;
    errno = EIO;
    return 1;
}

int fsync(int file)
{
    REAL(fsync);
    return sync_fails(file) ? -1 : real(file);
}

int fdatasync(int file)
{
    REAL(fdatasync);
    return sync_fails(file) ? -1 : real(file);
}

/* Python alone sees another time: others hand absolute times of this clock to the kernel, whose
   clock stands as it did, and would wait for as long as the clock has jumped. */
static int is_python(const void *caller)
{
    Dl_info of_caller, of_python;
    const void *known = dlsym(RTLD_DEFAULT, "Py_GetVersion");
    if (known == NULL || !dladdr(known, &of_python) || !dladdr(caller, &of_caller))
        return 0;
    return of_caller.dli_fbase == of_python.dli_fbase;
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    REAL(clock_gettime);
    int code = real(id, now);
    if (code == 0 && control->clock_s && id == CLOCK_REALTIME
        && is_python(__builtin_return_address(0)))
        now->tv_sec += control->clock_s;
    return code;
}
