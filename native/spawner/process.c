/* Level `process`: no namespaces. Landlock, seccomp, limits and, for root, a user id of its own. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "spawner.h"

static int own_session(struct child *c) {
    (void)c;
    return setsid() < 0 ? -1 : 0;
}

/* The engine made the directories before it knew which user id they would be for. */
static int own_directory(struct child *c) {
    static const char *const made[] = {".", "tmp", "home"};
    char path[4096];
    memcpy(path, c->p->directory.p, c->p->directory.n);
    path[c->p->directory.n] = 0;
    if (chdir(path)) return -1;
    for (size_t i = 0; c->s->root && i < sizeof made / sizeof *made; i++)
        if (fchownat(AT_FDCWD, made[i], c->uid, c->uid, AT_SYMLINK_NOFOLLOW)) return -1;
    return 0;
}

static int join_cgroups(struct child *c) {
    int err = c->joined ? 0 : slot_join_v1(c->s, c->slot);
    errno = err;
    return err ? -1 : 0;
}

static int limit(int resource, rlim_t value) {
    struct rlimit now;
    if (getrlimit(resource, &now)) return -1;
    if (value > now.rlim_max) value = now.rlim_max;
    now.rlim_cur = now.rlim_max = value;
    return setrlimit(resource, &now);
}

static int limit_resources(struct child *c) {
    const struct limits *l = &c->p->limits;
    if (limit(RLIMIT_AS, l->memory) || limit(RLIMIT_MEMLOCK, 65536)) return -1;
    /* Counted per user id: only a private one makes it a limit of this sandbox. */
    return c->s->root ? limit(RLIMIT_NPROC, l->pids + 1) : 0;
}

static int own_user(struct child *c) {
    if (!c->s->root) return 0;
    return setgroups(0, NULL) || setresgid(c->uid, c->uid, c->uid) || setresuid(c->uid, c->uid, c->uid) ? -1 : 0;
}

/* Where no cgroup tells a successor of the spawner what runs, nothing may outlive the spawner: init ends all below it on SIGTERM. */
static int end_with_spawner(struct child *c) {
    if (c->s->n_groups || c->s->root) return 0;
    if (prctl(PR_SET_PDEATHSIG, SIGTERM)) return -1;
    return getppid() == c->s->pid ? 0 : (errno = ESRCH, -1);
}

static int drop_capabilities(struct child *c) {
    (void)c;
    return confine_capabilities(0);
}

/* What every sandbox may read is looked up ahead, by root where we are root: whether its own user may then enter is another matter. */
static int rules(struct child *c) { return (c->ruleset = landlock_rules(&c->s->config)) < 0 ? -1 : 0; }

static int landlock(struct child *c) { return landlock_enter(c->ruleset, c->p->directory); }

const struct operation process_prepare[] = {{"cgroups", join_cgroups}, {"session", own_session}, {"landlock rules", rules}, {NULL, NULL}};

const struct operation process_finish[] = {
    {"directory", own_directory},
    {"limits", limit_resources},
    {"user", own_user},
    {"capabilities", drop_capabilities},
    {"spawner's death", end_with_spawner},
    {"landlock", landlock},
    {NULL, NULL},
};

/* ---- ending, in the spawner ---- */

/* 1, 0, or -1 where nothing tells. (Where there are groups of version 1 only there are no zygotes in them either.) */
static int group_empty(const struct spawner *s, uint32_t slot) {
    char path[64], text[256];
    if (!s->n_groups) return -1;
    const struct hierarchy *h = &s->groups[s->n_groups - 1];
    for (unsigned i = 0; i < s->n_groups; i++)
        if (s->groups[i].v2) h = &s->groups[i];
    snprintf(path, sizeof path, "s%u/%s", slot, h->v2 ? "cgroup.events" : "cgroup.procs");
    long n = read_at(h->dir, path, text, sizeof text);
    if (n < 0 || (h->v2 && n == 0)) return -1;
    return h->v2 ? strstr(text, "populated 0") != NULL : n == 0;
}

/* Ends every process of a user id that only this sandbox has, at one stroke: the kernel walks them under its lock. Not by `cgroup.kill`:
 * after that, Linux 6.18 (for one) kills whatever is cloned into the group from outside, and groups are recycled here.
 *
 * Only its effective id is the sandbox's: whom a process may signal goes by that, who may signal it by its real and its saved one. Those are
 * of a neighbour that nobody is, or a sandbox that sends SIGSTOP to all it may would stop the child, and us, who wait for it, for ever.
 *
 * The child shares our memory, so that nothing need be copied for three calls: the system's own, as those of the C library would tell
 * its threads, ours, of the change. */
static bool kill_user(uint32_t uid) {
    pid_t pid = vfork();
    if (pid == 0) {
        bool is = !syscall(SYS_setresgid, uid, uid, uid) && !syscall(SYS_setresuid, uid + 1, uid, uid + 1);
        if (is) syscall(SYS_kill, -1, SIGKILL);
        _exit(!is);
    }
    int status = 1;
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

/* Orphans came to us, their subreaper: those of our children that are no init. 0 when there are none. */
static unsigned kill_orphans(struct spawner *s) {
    char path[64];
    snprintf(path, sizeof path, "self/task/%d/children", getpid());
    int fd = openat(s->proc, path, O_RDONLY | O_CLOEXEC);
    FILE *children = fd < 0 ? NULL : fdopen(fd, "r");
    unsigned killed = 0;
    for (int pid; children && fscanf(children, "%d", &pid) == 1;)
        if (!table_by_pid(s, pid)) {
            killed += !kill(pid, SIGKILL);
            waitpid(pid, NULL, WNOHANG);
        }
    if (children) fclose(children);
    return killed;
}

/* Nobody else is served meanwhile, so it is not tried for long: whoever asked for the end asks again. A process of the sandbox
 * cannot leave its control group, so an empty one says that all is over. */
bool process_end_all(struct spawner *s, uint32_t slot) {
    if (s->root && group_empty(s, slot) == 1) return true;
    for (int tries = 0; tries < 340; tries++) {
        bool killed = s->root ? kill_user(slot_uid(slot)) : kill_orphans(s) == 0;
        if (killed && (!s->root || group_empty(s, slot))) return true;
        usleep(tries < 40 ? 25 : 1000); /* most are dead within a tenth of a millisecond */
    }
    note("processes outlive their sandbox", "", EBUSY);
    return false;
}
