/* The spawner's own world: an empty file system that holds the trees which sandboxes are made from, and /dev nodes.
 *
 * Everything is below /t, one mount, so that a child gets rid of all of it with one umount. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "spawner.h"

static void node(const char *path, unsigned minor, unsigned major) {
    if (mknod(path, S_IFCHR | 0666, makedev(major, minor)) || chmod(path, 0666)) die(path);
}

static void directory(const char *path, mode_t mode) {
    if (mkdir(path, mode) || chmod(path, mode)) die(path);
}

static void make_dev(void) {
    static const char *const links[][2] = {{"/proc/self/fd", "/t/dev/fd"},       {"/proc/self/fd/0", "/t/dev/stdin"},
                                           {"/proc/self/fd/1", "/t/dev/stdout"}, {"/proc/self/fd/2", "/t/dev/stderr"},
                                           {"pts/ptmx", "/t/dev/ptmx"}};
    directory("/t/dev", 0755);
    node("/t/dev/null", 3, 1);
    node("/t/dev/zero", 5, 1);
    node("/t/dev/full", 7, 1);
    node("/t/dev/random", 8, 1);
    node("/t/dev/urandom", 9, 1);
    node("/t/dev/tty", 0, 5);
    directory("/t/dev/pts", 0755);
    directory("/t/dev/shm", 01777);
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1])) die(links[i][1]);
}

void world_enter(struct spawner *s) {
    const char *at = s->config.state;
    if (unshare(CLONE_NEWNS)) die("unshare mount namespace");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) die("make / private");
    if (mount("dsec", at, "tmpfs", MS_NOSUID | MS_NOEXEC, "size=1m,nr_inodes=16k,mode=755")) die("mount root");
    if (chdir(at) || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/")) die("enter root");
    directory("/t", 0755);
    if (mount("/t", "/t", NULL, MS_BIND, NULL)) die("bind /t");
    directory("/t/l", 0755);
    directory("/t/empty", 0555);
    make_dev();
}

int world_attach(const char *name, int fd) {
    char path[160];
    snprintf(path, sizeof path, "/t/l/%s", name);
    if (mkdir(path, 0755)) return errno;
    if (!move_mount(fd, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH)) return 0;
    int err = errno;
    rmdir(path);
    return err;
}
