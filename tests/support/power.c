/* What a disk would hold after its power is cut, kept beside the real files.
 *
 * Preloaded into a node (LD_PRELOAD), this library lets every write through and keeps a second
 * directory, the image, that is changed by fsync and fdatasync alone:
 *   - a file's content goes to the image when the file is synced, and not before;
 *   - a name (created, renamed, removed) goes to the image when its directory is synced.
 * Kill the process, start another one on the image: that is a power cut in which everything that
 * was not synced is lost. It is stricter than most disks, which keep some of it.
 *
 * It works by copying at the sync rather than by following writes, so it also sees what reached the
 * file by a raw system call. sync_file_range and msync make nothing durable here, as on a disk.
 *
 * POWER_ROOT   the data directory, absolute
 * POWER_IMAGE  where the image is kept: inodes/ (contents), tree/ (names, as hard links), syncs
 *              (one byte a mirrored sync: d = directory, f = file)
 * A file POWER_IMAGE/lie makes every sync a lie from then on: it answers 0 and mirrors nothing.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK 4096
#define CHUNK (64 * BLOCK)

typedef char path_t[PATH_MAX];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void die(const char *what, const char *path) {
    dprintf(2, "power.c: %s %s: %s\n", what, path, strerror(errno));
    abort();
}

static void join(path_t out, const char *dir, const char *name) {
    int length = snprintf(out, PATH_MAX, "%s/%s", dir, name);
    if (length < 0 || length >= PATH_MAX) die("path too long:", dir);
}

/* A file's name in inodes/: its inode and birth, since an inode number is used again. */
static void content_path(path_t out, int dirfd, const char *path, int flags) {
    struct statx info;
    if (statx(dirfd, path, flags, STATX_INO | STATX_BTIME, &info) != 0) die("statx", path);
    int length = snprintf(out, PATH_MAX, "%s/inodes/%llu-%lld-%u", getenv("POWER_IMAGE"),
                          (unsigned long long)info.stx_ino, (long long)info.stx_btime.tv_sec,
                          info.stx_btime.tv_nsec);
    if (length < 0 || length >= PATH_MAX) die("path too long:", path);
}

static void create_empty(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) die("create", path);
    close(fd);
}

/* Copies the blocks that differ. */
static void mirror_file(int fd) {
    static char now[CHUNK], then[CHUNK];
    path_t self, content;
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    content_path(content, fd, "", AT_EMPTY_PATH);
    int from = open(self, O_RDONLY | O_CLOEXEC);
    int to = open(content, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (from < 0 || to < 0) die("open", content);
    off_t at = 0;
    ssize_t got;
    while ((got = pread(from, now, CHUNK, at)) > 0) {
        ssize_t had = pread(to, then, got, at);
        if (had < 0) die("read", content);
        for (ssize_t block = 0; block < got; block += BLOCK) {
            ssize_t length = got - block < BLOCK ? got - block : BLOCK;
            if (had >= block + length && memcmp(now + block, then + block, length) == 0) continue;
            if (pwrite(to, now + block, length, at + block) != length) die("write", content);
        }
        at += got;
    }
    if (got < 0) die("read", self);
    if (ftruncate(to, at) != 0) die("truncate", content);
    close(from);
    close(to);
}

static void remove_all(const char *path) {
    if (unlink(path) == 0) return;
    DIR *dir = opendir(path);
    if (dir == NULL) die("remove", path);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        path_t child;
        join(child, path, entry->d_name);
        remove_all(child);
    }
    closedir(dir);
    if (rmdir(path) != 0) die("rmdir", path);
}

/* Gives one name of a directory its place in the image. */
static void mirror_name(const char *real, const char *image) {
    struct stat info, ours, linked;
    if (lstat(real, &info) != 0) return; /* gone meanwhile */
    if (S_ISDIR(info.st_mode)) {
        if (mkdir(image, 0700) != 0 && errno != EEXIST) die("mkdir", image);
        return;
    }
    if (!S_ISREG(info.st_mode)) return;
    path_t content;
    content_path(content, AT_FDCWD, real, AT_SYMLINK_NOFOLLOW);
    if (access(content, F_OK) != 0) create_empty(content);
    if (stat(content, &ours) != 0) die("stat", content);
    if (lstat(image, &linked) == 0) {
        if (linked.st_ino == ours.st_ino) return;
        remove_all(image);
    }
    if (link(content, image) != 0) die("link", image);
}

static void mirror_directory(const char *real, const char *image) {
    if (mkdir(image, 0700) != 0 && errno != EEXIST) die("mkdir", image);
    DIR *dir = opendir(real);
    if (dir == NULL) die("opendir", real);
    path_t from, to;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        join(from, real, entry->d_name);
        join(to, image, entry->d_name);
        mirror_name(from, to);
    }
    closedir(dir);
    dir = opendir(image);
    if (dir == NULL) die("opendir", image);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        join(from, real, entry->d_name);
        join(to, image, entry->d_name);
        if (access(from, F_OK) != 0) remove_all(to);
    }
    closedir(dir);
}

static void count(const char *image, const char *kind) {
    path_t path;
    join(path, image, "syncs");
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, kind, 1) != 1) die("count", path);
    close(fd);
}

static void mirror(int fd, const char *root, const char *image) {
    path_t self, real, to;
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(self, real, sizeof real - 1);
    if (length < 0) die("readlink", self);
    real[length] = 0;
    size_t prefix = strlen(root);
    if (strncmp(real, root, prefix) != 0 || (real[prefix] != 0 && real[prefix] != '/')) return;
    struct stat info;
    if (fstat(fd, &info) != 0) die("fstat", real);
    if (S_ISREG(info.st_mode)) {
        mirror_file(fd);
        count(image, "f");
    } else if (S_ISDIR(info.st_mode)) {
        join(to, image, "tree");
        if (real[prefix] == '/') {
            path_t tree;
            strcpy(tree, to);
            join(to, tree, real + prefix + 1);
        }
        mirror_directory(real, to);
        count(image, "d");
    }
}

static int synced(int fd, const char *name) {
    const char *root = getenv("POWER_ROOT"), *image = getenv("POWER_IMAGE");
    if (root != NULL && image != NULL) {
        path_t lie;
        join(lie, image, "lie");
        if (access(lie, F_OK) == 0) return 0;
    }
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    int result = real(fd);
    if (result == 0 && root != NULL && image != NULL) {
        int before = errno;
        pthread_mutex_lock(&lock);
        mirror(fd, root, image);
        pthread_mutex_unlock(&lock);
        errno = before;
    }
    return result;
}

int fsync(int fd) { return synced(fd, "fsync"); }

int fdatasync(int fd) { return synced(fd, "fdatasync"); }
