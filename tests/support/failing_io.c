/* File operations that fail, kept between a program and its C library by LD_PRELOAD: see failing_io.py. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { READ_OPEN = 1, READ = 2, LIST = 4, STAT = 8, WRITE_OPEN = 16, WRITE = 32, SYNC = 64, CHANGE = 128 };
enum { MOST = 65536 };

static char prefix[4096];
static int kinds, number;
static long first, times, seen;
static char ours[MOST]; /* by descriptor: a file below the prefix */

/* Operations of these kinds on paths with the prefix fail with `error`, from number `at` (of 1, 2, ...) on, so often;
   -9 kills the process instead. */
void failing_io_arm(const char *path, int of, int error, long at, long often) {
    snprintf(prefix, sizeof prefix, "%s", path);
    kinds = of;
    number = error;
    first = at;
    times = often;
    seen = 0;
}

/* Lets everything through; returns how many operations were looked at. */
long failing_io_disarm(void) {
    kinds = 0;
    return seen;
}

static int fails(int kind, const char *path) {
    if (!(kinds & kind) || !path || !strstr(path, prefix))
        return 0;
    seen++;
    if (seen < first || seen >= first + times)
        return 0;
    if (number == -9)
        kill(getpid(), SIGKILL);
    errno = number;
    return 1;
}

static int fails_of(int kind, int fd) { return fd >= 0 && fd < MOST && ours[fd] && fails(kind, prefix); }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int opened(int fd, const char *path) {
    if (fd >= 0 && fd < MOST)
        ours[fd] = path && prefix[0] && strstr(path, prefix) != NULL;
    return fd;
}

static int kind_of(int flags) { return (flags & O_ACCMODE) == O_RDONLY ? READ_OPEN : WRITE_OPEN; }

#define MODE                                                                                                           \
    mode_t mode = 0;                                                                                                   \
    if (flags & (O_CREAT | __O_TMPFILE)) {                                                                             \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode = va_arg(more, mode_t);                                                                                   \
        va_end(more);                                                                                                  \
    }

int open(const char *path, int flags, ...) {
    MODE
    return fails(kind_of(flags), path) ? -1 : opened(REAL(open)(path, flags, mode), path);
}

int open64(const char *path, int flags, ...) {
    MODE
    return fails(kind_of(flags), path) ? -1 : opened(REAL(open64)(path, flags, mode), path);
}

int openat(int at, const char *path, int flags, ...) {
    MODE
    return fails(kind_of(flags), path) ? -1 : opened(REAL(openat)(at, path, flags, mode), path);
}

int openat64(int at, const char *path, int flags, ...) {
    MODE
    return fails(kind_of(flags), path) ? -1 : opened(REAL(openat64)(at, path, flags, mode), path);
}

int close(int fd) {
    if (fd >= 0 && fd < MOST)
        ours[fd] = 0;
    return REAL(close)(fd);
}

ssize_t read(int fd, void *to, size_t size) { return fails_of(READ, fd) ? -1 : REAL(read)(fd, to, size); }

ssize_t pread64(int fd, void *to, size_t size, off64_t at) {
    return fails_of(READ, fd) ? -1 : REAL(pread64)(fd, to, size, at);
}

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t at) {
    return fails_of(READ, fd) ? MAP_FAILED : REAL(mmap64)(address, size, protection, flags, fd, at);
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t at) {
    return fails_of(READ, fd) ? MAP_FAILED : REAL(mmap)(address, size, protection, flags, fd, at);
}

DIR *opendir(const char *path) { return fails(LIST, path) ? NULL : REAL(opendir)(path); }

int stat(const char *path, struct stat *to) { return fails(STAT, path) ? -1 : REAL(stat)(path, to); }

int stat64(const char *path, struct stat64 *to) { return fails(STAT, path) ? -1 : REAL(stat64)(path, to); }

int lstat(const char *path, struct stat *to) { return fails(STAT, path) ? -1 : REAL(lstat)(path, to); }

int lstat64(const char *path, struct stat64 *to) { return fails(STAT, path) ? -1 : REAL(lstat64)(path, to); }

int fstat64(int fd, struct stat64 *to) { return fails_of(STAT, fd) ? -1 : REAL(fstat64)(fd, to); }

int fstatat64(int at, const char *path, struct stat64 *to, int flags) {
    return fails(STAT, path) ? -1 : REAL(fstatat64)(at, path, to, flags);
}

int statx(int at, const char *path, int flags, unsigned int mask, struct statx *to) {
    return (path && path[0] ? fails(STAT, path) : fails_of(STAT, at)) ? -1 : REAL(statx)(at, path, flags, mask, to);
}

ssize_t write(int fd, const void *from, size_t size) { return fails_of(WRITE, fd) ? -1 : REAL(write)(fd, from, size); }

ssize_t pwrite64(int fd, const void *from, size_t size, off64_t at) {
    return fails_of(WRITE, fd) ? -1 : REAL(pwrite64)(fd, from, size, at);
}

int ftruncate64(int fd, off64_t size) { return fails_of(WRITE, fd) ? -1 : REAL(ftruncate64)(fd, size); }

int fsync(int fd) { return fails_of(SYNC, fd) ? -1 : REAL(fsync)(fd); }

int rename(const char *from, const char *to) { return fails(CHANGE, from) ? -1 : REAL(rename)(from, to); }

int renameat(int a, const char *from, int b, const char *to) {
    return fails(CHANGE, from) ? -1 : REAL(renameat)(a, from, b, to);
}

int mkdir(const char *path, mode_t mode) { return fails(CHANGE, path) ? -1 : REAL(mkdir)(path, mode); }

int unlink(const char *path) { return fails(CHANGE, path) ? -1 : REAL(unlink)(path); }

int unlinkat(int at, const char *path, int flags) { return fails(CHANGE, path) ? -1 : REAL(unlinkat)(at, path, flags); }

int rmdir(const char *path) { return fails(CHANGE, path) ? -1 : REAL(rmdir)(path); }
