/* Level `container`: namespaces, an overlay over id-mapped layers, and nothing of the host.
 *
 * All namespaces but the user namespace belong to the *initial* user namespace, and the sandbox enters its own user namespace last.
 * So its root owns none of them: even a capability that it regained could not touch mounts, network or host name. The
 * order also lets the child do everything itself, without a hand-shake with the spawner. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/openat2.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "spawner.h"

#define KEEP                                                                                                          \
    (1ULL << CAP_CHOWN | 1ULL << CAP_DAC_OVERRIDE | 1ULL << CAP_FOWNER | 1ULL << CAP_FSETID | 1ULL << CAP_KILL |     \
     1ULL << CAP_SETGID | 1ULL << CAP_SETUID | 1ULL << CAP_NET_BIND_SERVICE)

static int join_cgroups(struct child *c) {
    int err = c->joined ? 0 : slot_join_v1(c->s, c->slot);
    errno = err;
    return err ? -1 : 0;
}

static int new_network(struct child *c) {
    (void)c;
    return network_enter();
}

static int new_namespaces(struct child *c) {
    (void)c;
    return unshare(CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP);
}

static int host_name(struct child *c) { return sethostname((const char *)c->p->hostname.p, c->p->hostname.n); }

int make_mount(const char *type, const char *const *options, unsigned attributes) {
    int fs = fsopen(type, FSOPEN_CLOEXEC);
    if (fs < 0) return -1;
    for (; options && *options; options += 2)
        if (fsconfig(fs, FSCONFIG_SET_STRING, options[0], options[1], 0)) return -1;
    if (fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0)) return -1;
    int mnt = fsmount(fs, FSMOUNT_CLOEXEC, attributes);
    close(fs);
    return mnt;
}

static int open_proc(struct child *c) {
    c->proc = make_mount("proc", NULL, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    return c->proc < 0 ? -1 : 0;
}

static int map_ids(struct child *c) {
    if (c->users < 0) c->users = users_make(c->proc, c->s->proc, c->uid);
    return c->users < 0 ? -1 : 0;
}

/* A detached clone of the tree at `path` whose ids are those of this sandbox. */
static int mapped(const struct child *c, int dir, const char *path, uint64_t set) {
    unsigned empty = *path ? 0 : AT_EMPTY_PATH;
    int fd = open_tree(dir, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | empty);
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP | set, .userns_fd = (uint64_t)c->users};
    if (fd < 0) return -1;
    return mount_setattr(fd, "", AT_EMPTY_PATH, &attr, sizeof attr) ? -1 : fd;
}

static int plain(const char *path, uint64_t set) {
    int fd = open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    struct mount_attr attr = {.attr_set = set};
    return fd < 0 || mount_setattr(fd, "", AT_EMPTY_PATH, &attr, sizeof attr) ? -1 : fd;
}

static int put_at(int mnt, int target) {
    int r = move_mount(mnt, "", target, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
    close(target);
    return r;
}

/* ---- what can be made before anything is known of the sandbox: its own mount namespace, a copy of the blank one, in which /dev and
 * /proc wait for their places in a root that is not there yet ---- */

static int enter_blank(struct child *c) {
    if (setns(c->s->blank, CLONE_NEWNS) || unshare(CLONE_NEWNS)) return -1;
    c->mounts = openat(c->s->proc, "self/ns/mnt", O_RDONLY | O_CLOEXEC);
    return c->mounts < 0 ? -1 : 0;
}

/* /dev is one shared tree, read-only; only its terminals (and shared memory, which is of the root) are the sandbox's own. */
static int wait_devices(struct child *c) {
    static const char *const pts_options[] = {"ptmxmode", "0666", "mode", "0620", NULL};
    uint64_t fixed = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC;
    c->dev = mapped(c, AT_FDCWD, "/dev", fixed);
    if (c->dev < 0 && errno == EINVAL) c->dev = plain("/dev", fixed); /* no id-mapped tmpfs before Linux 6.3: `nobody` owns it */
    if (c->dev < 0 || move_mount(c->dev, "", AT_FDCWD, "/l", MOVE_MOUNT_F_EMPTY_PATH)) return -1;
    int pts = make_mount("devpts", pts_options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
    return pts < 0 ? -1 : move_mount(pts, "", c->dev, "pts", MOVE_MOUNT_F_EMPTY_PATH) || close(pts) ? -1 : 0;
}

static int wait_proc(struct child *c) { return move_mount(c->proc, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH); }

/* What of /proc tells of the host is covered. Files that only the host's root may open need no cover: that id does not
 * exist inside. (A test tries them all.) Absent ones need none either. */
static int mask_proc(struct child *c) {
    static const char *const names[] = {"cmdline", "keys", "key-users", "interrupts", "latency_stats", "sched_debug", "acpi", "scsi",
                                        "asound", "bus", "fs", "irq", "pressure"};
    struct stat st;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int target = openat(c->proc, names[i], O_PATH | O_NOFOLLOW | O_CLOEXEC);
        if (target < 0) continue;
        if (fstat(target, &st)) return -1;
        const char *with = S_ISDIR(st.st_mode) ? "/empty" : "/dev/null";
        int cover = open_tree(AT_FDCWD, with, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
        if (cover < 0 || put_at(cover, target)) return -1;
        close(cover);
    }
    int sys = open_tree(c->proc, "sys", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_RDONLY};
    if (sys < 0 || mount_setattr(sys, "", AT_EMPTY_PATH, &attr, sizeof attr)) return -1;
    int target = openat(c->proc, "sys", O_PATH | O_CLOEXEC);
    return target < 0 ? -1 : put_at(sys, target);
}

static int back_to_world(struct child *c) { return setns(c->s->world, CLONE_NEWNS); }

/* ---- what is made of the request ---- */

static int map_layers(struct child *c) {
    char path[160];
    for (unsigned i = 0; i < c->p->n_layers; i++) {
        snprintf(path, sizeof path, "/l/%.*s", (int)c->p->layers[i].n, (const char *)c->p->layers[i].p);
        if ((c->layers[i] = mapped(c, AT_FDCWD, path, MOUNT_ATTR_RDONLY)) < 0) return -1;
    }
    snprintf(path, sizeof path, "/l/rw/%.*s", (int)c->p->writable.n, (const char *)c->p->writable.p);
    return (c->writable = mapped(c, AT_FDCWD, path, 0)) < 0 ? -1 : 0;
}

/* Overlay works in its upper layer with the credentials of whoever mounts it: the sandbox's own root, so that on the
 * id-mapped layer its files are owned by 0, with our capabilities in the initial user namespace. */
static int as_sandbox_root(const struct child *c, bool on) {
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &head, data)) return -1;
    setfsgid(on ? c->uid : 0);
    setfsuid(on ? c->uid : 0); /* drops the file-system capabilities from the effective set */
    for (int i = 0; i < 2; i++) data[i].effective = data[i].permitted;
    return (int)syscall(SYS_capset, &head, data);
}

/* Older kernels have overlay take paths, not descriptors (before 6.13), and only of mounts that are attached in the namespace of
 * whoever mounts it (before 6.15). So ours are attached, in a namespace of our own, and named by what /proc has for their descriptors. */
static int attach_layers(const struct child *c) {
    if (unshare(CLONE_NEWNS)) return -1;
    for (unsigned i = 0; i < c->p->n_layers; i++)
        if (move_mount(c->layers[i], "", AT_FDCWD, "/empty", MOVE_MOUNT_F_EMPTY_PATH)) return -1;
    return move_mount(c->writable, "", AT_FDCWD, "/empty", MOVE_MOUNT_F_EMPTY_PATH);
}

typedef int layers_setter(const struct child *c, int fs, int upper, int work);

static int layers_by_path(const struct child *c, int fs, int upper, int work) {
    char lower[LAYERS_MAX * 24], path[32];
    size_t n = 0;
    for (unsigned i = 0; i < c->p->n_layers; i++)
        n += (size_t)snprintf(lower + n, sizeof lower - n, "%sself/fd/%d", i ? ":" : "", c->layers[i]);
    if (fchdir(c->proc) || fsconfig(fs, FSCONFIG_SET_STRING, "lowerdir", lower, 0)) return -1;
    snprintf(path, sizeof path, "self/fd/%d", upper);
    if (fsconfig(fs, FSCONFIG_SET_STRING, "upperdir", path, 0)) return -1;
    snprintf(path, sizeof path, "self/fd/%d", work);
    return fsconfig(fs, FSCONFIG_SET_STRING, "workdir", path, 0);
}

static int layers_by_fd(const struct child *c, int fs, int upper, int work) {
    for (unsigned i = 0; i < c->p->n_layers; i++)
        if (fsconfig(fs, FSCONFIG_SET_FD, "lowerdir+", NULL, c->layers[i])) return -1;
    return fsconfig(fs, FSCONFIG_SET_FD, "upperdir", NULL, upper) || fsconfig(fs, FSCONFIG_SET_FD, "workdir", NULL, work) ? -1 : 0;
}

static int configure_overlay(const struct child *c, int fs, layers_setter *set) {
    int upper = openat(c->writable, "upper", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int work = openat(c->writable, "work", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (upper < 0 || work < 0 || set(c, fs, upper, work)) return -1;
    if (fsconfig(fs, FSCONFIG_SET_STRING, "source", "dsec", 0)) return -1;
    /* Its own UUID would be written to the upper layer at every mount, and nobody asks for it. The others hold whatever this
     * kernel was configured for: the entries of the upper directory alone tell what is in it, so that layers can be made of it. */
    static const char *const plain[][2] = {{"uuid", "off"}, {"redirect_dir", "nofollow"}, {"metacopy", "off"}, {"index", "off"}};
    for (unsigned i = 0; i < sizeof plain / sizeof *plain; i++)
        if (fsconfig(fs, FSCONFIG_SET_STRING, plain[i][0], plain[i][1], 0)) return -1;
    if (fsconfig(fs, FSCONFIG_SET_FLAG, "volatile", NULL, 0)) return -1;
    return fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0);
}

static int overlay(const struct child *c, layers_setter *set) {
    int fs = fsopen("overlay", FSOPEN_CLOEXEC);
    if (fs < 0 || configure_overlay(c, fs, set)) return -1;
    return fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
}

/* An overlay refuses a work directory in which an earlier volatile one left its mark: that says something may not have reached the disk.
 * Of a layer that nobody wrote to there is nothing to reach it, and of all others the work directory is made anew before this. */
static void remove_mark(const struct child *c) {
    char path[192];
    int n = snprintf(path, sizeof path, "/l/rw/%.*s/work/work/incompat/volatile/dirty", (int)c->p->writable.n, (const char *)c->p->writable.p);
    unlink(path);
    path[n - (int)strlen("/dirty")] = 0;
    rmdir(path);
}

static int make_root(struct child *c) {
    remove_mark(c);
    if (as_sandbox_root(c, true)) return -1;
    c->root = overlay(c, layers_by_fd);
    if (c->root < 0 && (errno == EINVAL || errno == EOPNOTSUPP) && !attach_layers(c)) {
        c->attached = true;
        c->root = overlay(c, layers_by_path);
    }
    return c->root < 0 ? -1 : as_sandbox_root(c, false);
}

/* A directory of the sandbox's root, resolved as if it were the root of everything: no link leads out. */
static int in_root(const struct child *c, const char *path, uint64_t flags) {
    struct open_how how = {.flags = O_PATH | O_CLOEXEC | flags, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, c->root, path, &how, sizeof how);
}

static int put(const struct child *c, int mnt, const char *path) {
    int target = in_root(c, path, 0);
    return mnt < 0 || target < 0 ? -1 : put_at(mnt, target);
}

/* Owner and mode of directories made on the way to a mount point: the sandbox's root. */
static int make_way(const struct child *c, const char *path, bool file) {
    char part[4096];
    if (as_sandbox_root(c, true)) return -1;
    for (const char *slash = strchr(path + 1, '/');; slash = strchr(slash + 1, '/')) {
        size_t n = slash ? (size_t)(slash - path) : strlen(path);
        memcpy(part, path, n);
        part[n] = 0;
        char *last = strrchr(part, '/');
        *last = 0;
        int dir = in_root(c, *part ? part : "/", O_DIRECTORY);
        if (dir < 0) return -1;
        int r = !slash && file ? mknodat(dir, last + 1, S_IFREG | 0644, 0) : mkdirat(dir, last + 1, 0755);
        int err = errno;
        close(dir);
        errno = err;
        if (r && errno != EEXIST) return -1;
        if (!slash) return as_sandbox_root(c, false);
    }
}

static int put_volumes(struct child *c) {
    char path[4096];
    for (unsigned i = 0; i < c->p->n_volumes; i++) {
        const struct volume *v = &c->p->volumes[i];
        struct stat st;
        memcpy(path, v->target.p, v->target.n);
        path[v->target.n] = 0;
        if (fstat(v->fd, &st) || make_way(c, path, !S_ISDIR(st.st_mode))) return -1;
        struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV |
                                              (v->read_only ? MOUNT_ATTR_RDONLY : 0),
                                  .userns_fd = (uint64_t)c->users};
        if (mount_setattr(v->fd, "", AT_EMPTY_PATH, &attr, sizeof attr) || put(c, v->fd, path)) return -1;
    }
    return 0;
}

/* A clone of the root's /dev/shm. Most bases have it; making it costs a copy of /dev in the writable layer. */
static int shared_memory(const struct child *c) {
    struct stat st;
    char path[32];
    int shm = in_root(c, "/dev/shm", O_DIRECTORY | O_NOFOLLOW);
    if (shm < 0 && (errno != ENOENT || make_way(c, "/dev/shm", false) || (shm = in_root(c, "/dev/shm", O_DIRECTORY | O_NOFOLLOW)) < 0))
        return -1;
    snprintf(path, sizeof path, "self/fd/%d", shm);
    if (fstat(shm, &st) || ((st.st_mode & 07777) != 01777 && fchmodat(c->proc, path, 01777, 0))) return -1;
    int clone = open_tree(shm, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH);
    close(shm);
    return clone;
}

static int put_devices(struct child *c) {
    int shm = shared_memory(c); /* first: what is below /dev in the root is covered then */
    return shm < 0 || put(c, c->dev, "/dev") || put(c, shm, "/dev/shm") ? -1 : 0;
}

static int put_proc(struct child *c) { return put(c, c->proc, "/proc"); }

static int read_only_root(struct child *c) {
    static const char *const writable[] = {"/workspace", "/tmp", "/home/user"};
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_RDONLY};
    int kept[3];
    if (!c->p->read_only) return 0;
    for (int i = 0; i < 3; i++)
        if ((kept[i] = open_tree(c->root, writable[i] + 1, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE)) < 0) return -1;
    if (mount_setattr(c->root, "", AT_EMPTY_PATH, &attr, sizeof attr)) return -1;
    for (int i = 0; i < 3; i++)
        if (put(c, kept[i], writable[i])) return -1;
    return 0;
}

/* Out of the way, below what will be the root. Closed while they belong to nothing they would be dissolved one by one, each time
 * waiting for every CPU; like this they go with all other mounts of the sandbox, at once. */
static int stow(const struct child *c) {
    for (unsigned i = 0; i < c->p->n_layers; i++)
        if (move_mount(c->layers[i], "", AT_FDCWD, "/empty", MOVE_MOUNT_F_EMPTY_PATH)) return -1;
    return move_mount(c->writable, "", AT_FDCWD, "/empty", MOVE_MOUNT_F_EMPTY_PATH);
}

/* There are no other mounts than our own: what was prepared, now covered by the overlay. */
static int cover_root(struct child *c) {
    if (setns(c->mounts, CLONE_NEWNS) || (!c->attached && stow(c))) return -1;
    return move_mount(c->root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH);
}

static int enter_root(struct child *c) { return fchdir(c->root) || chroot(".") || chdir("/") ? -1 : 0; }

static int enter_users(struct child *c) {
    if (setns(c->users, CLONE_NEWUSER) || setgroups(0, NULL)) return -1;
    return setresgid(0, 0, 0) || setresuid(0, 0, 0) ? -1 : 0;
}

static int drop_capabilities(struct child *c) {
    (void)c;
    return confine_capabilities(KEEP);
}

const struct operation container_prepare[] = {
    {"proc", open_proc},
    {"id map", map_ids},
    {"loopback", new_network},
    {"cgroups", join_cgroups},
    {"namespaces", new_namespaces},
    {"blank root", enter_blank},
    {"devices", wait_devices},
    {"proc mount", wait_proc},
    {"proc masks", mask_proc},
    {"layers", back_to_world},
    {NULL, NULL},
};

const struct operation container_finish[] = {
    {"host name", host_name},
    {"layers", map_layers},
    {"overlay", make_root},
    {"root", cover_root},
    {"devices", put_devices},
    {"proc mount", put_proc},
    {"volumes", put_volumes},
    {"read-only root", read_only_root},
    {"enter root", enter_root},
    {"user namespace", enter_users},
    {"capabilities", drop_capabilities},
    {NULL, NULL},
};
