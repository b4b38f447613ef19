/* Wraps libc's file calls in a child process, for files below one root.
 *
 * Faults: while the control file exists, each of its lines `ops pattern errno skip mode` makes the named calls on
 * files whose path matches the pattern fail with that errno, after `skip` successful ones. Mode `half` first writes
 * half of the bytes of one write, like a disk that becomes full.
 *
 * Record: the durable data, one line per event, in order:
 *     N ino path    a file was created         S ino bytes n   this many of its bytes are durable, and its overwrites
 *                                                              with numbers below n
 *     M path        a directory was created    D path          the names in a directory are durable
 *     R ino old new   rename                   U ino path      unlink
 *     L ino new       link                     T ino bytes     truncate
 *     W number ino at bytes undo               an overwrite; the old bytes are in the file `record`.undo from byte
 *                                              `undo` on
 *     Y number      that overwrite is durable
 * Files that lose their name are kept in the removed_dir, named by inode, because their removal may be undone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX], control[PATH_MAX], removed_dir[PATH_MAX];
static int record_fd = -1, undo_fd = -1;
static long overwrites, undo_end;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long passed[16];
static int halved[16];
static ino_t control_ino;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void shim_configure(const char *r, const char *c, const char *record, const char *g) {
    snprintf(root, sizeof root, "%s", r);
    snprintf(control, sizeof control, "%s", c);
    snprintf(removed_dir, sizeof removed_dir, "%s", g);
    if (*record) {
        char undo[PATH_MAX + 8];
        snprintf(undo, sizeof undo, "%s.undo", record);
        record_fd = REAL(open)(record, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        undo_fd = REAL(open)(undo, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        struct stat st;
        undo_end = fstat(undo_fd, &st) ? 0 : st.st_size;
    }
}

static int below(const char *path) {
    size_t n = strlen(root);
    return n && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

static void absolute(int dirfd, const char *path, char *out) {
    char base[PATH_MAX] = "";
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    if (dirfd == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) base[0] = 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
        ssize_t n = readlink(link, base, sizeof base - 1);
        base[n < 0 ? 0 : n] = 0;
    }
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) out[0] = 0;
}

static int of_fd(int fd, char *out) {
    if (!*root) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) return 0;
    out[n] = 0;
    return below(out);
}

static void note(const char *format, ...) {
    if (record_fd < 0) return;
    char line[2 * PATH_MAX + 64];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    syscall(SYS_write, record_fd, line, (size_t)n);
}

/* Return the errno of an injected fault, or 0. Sets *half if half of a write must succeed first. */
static int fault(const char *op, const char *path, int *half) {
    if (!*control) return 0;
    int fd = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return 0;
    char text[4096];
    ssize_t n = syscall(SYS_read, fd, text, sizeof text - 1);
    struct stat st;
    fstat(fd, &st);
    syscall(SYS_close, fd);
    text[n < 0 ? 0 : n] = 0;
    pthread_mutex_lock(&lock);
    if (st.st_ino != control_ino) {
        control_ino = st.st_ino;
        memset(passed, 0, sizeof passed);
        memset(halved, 0, sizeof halved);
    }
    int found = 0, rule = 0;
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line && rule < 16; line = strtok_r(NULL, "\n", &save), rule++) {
        char ops[256], pattern[PATH_MAX], mode[16] = "";
        int code;
        long skip;
        if (sscanf(line, "%255s %4095s %d %ld %15s", ops, pattern, &code, &skip, mode) < 4) continue;
        char list[258], wanted[64];
        snprintf(list, sizeof list, ",%s,", ops);
        snprintf(wanted, sizeof wanted, ",%s,", op);
        if (!strstr(list, wanted) || fnmatch(pattern, path, 0)) continue;
        if (passed[rule]++ < skip) continue;
        if (!strcmp(mode, "half") && half && !halved[rule]) {
            halved[rule] = 1;
            *half = 1;
            break;
        }
        found = code;
        break;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void keep_removed(const char *path) {
    struct stat st;
    if (record_fd < 0 || !*removed_dir || lstat(path, &st) || !S_ISREG(st.st_mode)) return;
    char kept[PATH_MAX + 32];
    snprintf(kept, sizeof kept, "%s/%lu", removed_dir, (unsigned long)st.st_ino);
    REAL(link)(path, kept);
}

static unsigned long inode(const char *path) {
    struct stat st;
    return lstat(path, &st) ? 0 : (unsigned long)st.st_ino;
}

static int opened(const char *op, int dirfd, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    absolute(dirfd, path, full);
    int known = *root && below(full), there = 0, code;
    if (known) {
        int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT);
        if (writes && (code = fault("open", full, NULL))) {
            errno = code;
            return -1;
        }
        there = access(full, F_OK) == 0;
    }
    int fd = syscall(SYS_openat, dirfd, path, flags | O_LARGEFILE, mode);
    (void)op;
    if (fd >= 0 && known && (flags & O_CREAT) && !there) note("N %lu %s\n", inode(full), full);
    return fd;
}

#define MODE(flags, last)                                  \
    mode_t mode = 0;                                       \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                 \
        va_list args;                                      \
        va_start(args, last);                              \
        mode = (mode_t)va_arg(args, int);                  \
        va_end(args);                                      \
    }

int open(const char *path, int flags, ...) { MODE(flags, flags) return opened("open", AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, flags) return opened("open", AT_FDCWD, path, flags, mode); }
int openat(int d, const char *path, int flags, ...) { MODE(flags, flags) return opened("open", d, path, flags, mode); }
int openat64(int d, const char *path, int flags, ...) { MODE(flags, flags) return opened("open", d, path, flags, mode); }

static int write_fault(const char *op, int fd, int *half) {
    char path[PATH_MAX];
    return of_fd(fd, path) ? fault(op, path, half) : 0;
}

/* Save the bytes that a write overwrites. Return the number of the overwrite, or -1 if there are none. */
static long overwritten(int fd, off_t at, size_t n) {
    char path[PATH_MAX];
    struct stat st;
    if (record_fd < 0 || !of_fd(fd, path) || fstat(fd, &st) || !S_ISREG(st.st_mode) || at >= st.st_size) return -1;
    if (n > (size_t)(st.st_size - at)) n = st.st_size - at;
    int source = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    char *old = source < 0 ? NULL : malloc(n);
    long number = -1;
    if (old && syscall(SYS_pread64, source, old, n, at) == (ssize_t)n) {
        pthread_mutex_lock(&lock);
        if (syscall(SYS_write, undo_fd, old, n) == (ssize_t)n) {
            number = overwrites++;
            note("W %ld %lu %ld %lu %ld\n", number, (unsigned long)st.st_ino, (long)at, (unsigned long)n, undo_end);
            undo_end += n;
        }
        pthread_mutex_unlock(&lock);
    }
    free(old);
    if (source >= 0) syscall(SYS_close, source);
    return number;
}

#define WRITE(op, pass_half, pass)        \
    int half = 0, code;                   \
    if ((code = write_fault(op, fd, &half))) { errno = code; return -1; } \
    if (half) return pass_half;           \
    return pass;

ssize_t write(int fd, const void *data, size_t n) {
    WRITE("write", syscall(SYS_write, fd, data, n > 1 ? n / 2 : n), syscall(SYS_write, fd, data, n))
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    overwritten(fd, at, n);
    WRITE("pwrite", syscall(SYS_pwrite64, fd, data, n > 1 ? n / 2 : n, at), syscall(SYS_pwrite64, fd, data, n, at))
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) { return pwrite(fd, data, n, at); }
ssize_t writev(int fd, const struct iovec *v, int n) {
    WRITE("writev", syscall(SYS_write, fd, v[0].iov_base, v[0].iov_len / 2), syscall(SYS_writev, fd, v, n))
}

ssize_t pwritev2(int fd, const struct iovec *v, int n, off_t at, int flags) {
    size_t size = 0;
    for (int i = 0; i < n; i++) size += v[i].iov_len;
    long number = overwritten(fd, at, size);
    int half = 0, code = write_fault("pwritev", fd, &half);
    if (half) return syscall(SYS_pwrite64, fd, v[0].iov_base, v[0].iov_len / 2, at);
    if (code) { errno = code; return -1; }
    ssize_t written = syscall(SYS_pwritev2, fd, v, (long)n, (long)at, 0L, flags);
    if (written == (ssize_t)size && number >= 0 && flags & RWF_DSYNC) note("Y %ld\n", number);
    return written;
}
ssize_t pwritev64v2(int fd, const struct iovec *v, int n, off64_t at, int flags) { return pwritev2(fd, v, n, at, flags); }
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t at) { return pwritev2(fd, v, n, at, 0); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t at) { return pwritev2(fd, v, n, at, 0); }

static int synced(const char *op, int fd, long number) {
    char path[PATH_MAX];
    int known = of_fd(fd, path), code;
    struct stat st;
    if (known) {
        if ((code = fault(op, path, NULL))) {
            errno = code;
            return -1;
        }
        /* The size before the call: later bytes may or may not be covered. */
        fstat(fd, &st);
    }
    pthread_mutex_lock(&lock);
    long before = overwrites;
    pthread_mutex_unlock(&lock);
    int result = syscall(number, fd);
    if (!result && known) {
        if (S_ISDIR(st.st_mode)) note("D %s\n", path);
        else note("S %lu %ld %ld\n", (unsigned long)st.st_ino, (long)st.st_size, before);
    }
    return result;
}
int fsync(int fd) { return synced("fsync", fd, SYS_fsync); }
int fdatasync(int fd) { return synced("fdatasync", fd, SYS_fdatasync); }
int sync_file_range(int fd, off64_t at, off64_t n, unsigned flags) {
    int code;
    if ((code = write_fault("sync_file_range", fd, NULL))) {
        errno = code;
        return -1;
    }
    return syscall(SYS_sync_file_range, fd, at, n, flags);
}

int rename(const char *from, const char *to) {
    char a[PATH_MAX], b[PATH_MAX];
    absolute(AT_FDCWD, from, a);
    absolute(AT_FDCWD, to, b);
    int known = *root && (below(a) || below(b)), code;
    if (known) {
        if ((code = fault("rename", b, NULL))) {
            errno = code;
            return -1;
        }
        keep_removed(b);
    }
    unsigned long ino = known ? inode(a) : 0;
    int result = syscall(SYS_rename, from, to);
    if (!result && known) note("R %lu %s %s\n", ino, a, b);
    return result;
}

int link(const char *from, const char *to) {
    char b[PATH_MAX];
    absolute(AT_FDCWD, to, b);
    int code;
    if (*root && below(b) && (code = fault("link", b, NULL))) {
        errno = code;
        return -1;
    }
    int result = syscall(SYS_link, from, to);
    if (!result && *root && below(b)) note("L %lu %s\n", inode(b), b);
    return result;
}

int unlinkat(int dirfd, const char *path, int flags) {
    char full[PATH_MAX];
    absolute(dirfd, path, full);
    int known = *root && below(full);
    unsigned long ino = known ? inode(full) : 0;
    if (known) keep_removed(full);
    int result = syscall(SYS_unlinkat, dirfd, path, flags);
    if (!result && known) note("U %lu %s\n", ino, full);
    return result;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }

int ftruncate(int fd, off_t n) {
    char path[PATH_MAX];
    struct stat st;
    int known = of_fd(fd, path);
    int result = syscall(SYS_ftruncate, fd, n);
    if (!result && known && !fstat(fd, &st)) note("T %lu %ld\n", (unsigned long)st.st_ino, (long)n);
    return result;
}
int ftruncate64(int fd, off64_t n) { return ftruncate(fd, n); }
int truncate(const char *path, off_t n) {
    char full[PATH_MAX];
    absolute(AT_FDCWD, path, full);
    int result = syscall(SYS_truncate, path, n);
    if (!result && *root && below(full)) note("T %lu %ld\n", inode(full), (long)n);
    return result;
}
int truncate64(const char *path, off64_t n) { return truncate(path, n); }

int mkdir(const char *path, mode_t mode) {
    char full[PATH_MAX];
    absolute(AT_FDCWD, path, full);
    int code;
    if (*root && below(full) && (code = fault("mkdir", full, NULL))) {
        errno = code;
        return -1;
    }
    int result = syscall(SYS_mkdir, path, mode);
    if (!result && *root && below(full)) note("M %s\n", full);
    return result;
}
