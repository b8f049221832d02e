/* The spawner's own world: one small file system with /dev nodes, in two mount namespaces.
 *
 * In the *blank* one it is all there is, and read-only: every sandbox's mount namespace is a copy of that. In the spawner's
 * own the trees that sandboxes are made from are mounted below /l; no copy has them, so none need be removed from it (removing
 * mounts waits for every CPU: 0.1 to 0.9 ms a sandbox). Of those that a sandbox is made from its namespace gets clones, covered by its root. */
#include <dirent.h>
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
    static const char *const links[][2] = {{"/proc/self/fd", "/dev/fd"},       {"/proc/self/fd/0", "/dev/stdin"},
                                           {"/proc/self/fd/1", "/dev/stdout"}, {"/proc/self/fd/2", "/dev/stderr"},
                                           {"pts/ptmx", "/dev/ptmx"}};
    directory("/dev", 0755);
    node("/dev/null", 3, 1);
    node("/dev/zero", 5, 1);
    node("/dev/full", 7, 1);
    node("/dev/random", 8, 1);
    node("/dev/urandom", 9, 1);
    node("/dev/tty", 0, 5);
    directory("/dev/pts", 0755);
    directory("/dev/shm", 01777);
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1])) die(links[i][1]);
}

/* In a plain chroot "/" is no mount, and nothing can take its place. Whoever enters a mount namespace gets that namespace's root: the one
 * above the chroot, which is left for good a moment later, with everything in it. */
static void leave_chroot(const struct spawner *s) {
    int own = openat(s->proc, "self/ns/mnt", O_RDONLY | O_CLOEXEC);
    if (own < 0 || setns(own, CLONE_NEWNS)) die("leave chroot");
    close(own);
}

void world_enter(struct spawner *s) {
    static const char *const options[] = {"source", "dsec", "size", "1m", "nr_inodes", "16k", "mode", "755", NULL};
    if (unshare(CLONE_NEWNS)) die("unshare mount namespace");
    int at = open(s->config.state, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (at < 0) die("state directory");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) {
        if (errno == EINVAL) leave_chroot(s);
        if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) die("make / private");
    }
    int root = make_mount("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
    if (root < 0 || move_mount(root, "", at, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH)) die("mount root");
    close(at);
    if (fchdir(root) || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/")) die("enter root");
    close(root);
    directory("/l", 0755);
    directory("/empty", 0555);
    directory("/proc", 0555);
    make_dev();
    struct mount_attr fixed = {.attr_set = MOUNT_ATTR_RDONLY};
    if (mount_setattr(AT_FDCWD, "/", 0, &fixed, sizeof fixed)) die("make root read-only");
    s->blank = openat(s->proc, "self/ns/mnt", O_RDONLY | O_CLOEXEC);
    if (s->blank < 0 || unshare(CLONE_NEWNS)) die("second mount namespace");
    struct mount_attr open_ = {.attr_clr = MOUNT_ATTR_RDONLY};
    if (mount_setattr(AT_FDCWD, "/", 0, &open_, sizeof open_)) die("make own root writable");
    s->world = openat(s->proc, "self/ns/mnt", O_RDONLY | O_CLOEXEC);
    if (s->world < 0) die("own mount namespace");
}

int world_attach(const char *name, int fd) {
    char path[160];
    snprintf(path, sizeof path, "/l/%s", name);
    if (mkdir(path, 0755)) return errno;
    if (!move_mount(fd, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH)) return 0;
    int err = errno;
    rmdir(path);
    return err;
}

static int detach_one(const char *name) {
    char path[300];
    snprintf(path, sizeof path, "/l/%s", name);
    if (umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW)) return errno;
    return rmdir(path) ? errno : 0;
}

/* What sandboxes have of it are clones of their own. Again and again from the start, since reading a directory that changes may
 * leave some out; one that stays is not tried for ever. */
static int detach_all(void) {
    unsigned found;
    int err = 0;
    do {
        DIR *all = opendir("/l");
        if (!all) return errno;
        found = 0;
        for (struct dirent *e; (e = readdir(all));)
            if (e->d_name[0] != '.' && strcmp(e->d_name, "rw")) {
                int one = detach_one(e->d_name);
                if (one) err = one;
                else found++;
            }
        closedir(all);
    } while (found);
    return err;
}

int world_detach(const char *name) { return *name ? detach_one(name) : detach_all(); }
