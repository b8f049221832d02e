/* A new process on its way to being init: it works through the operations of its level and dies on the first that
 * fails, telling the spawner which one. When the report pipe closes without a word, init runs. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawner.h"

static _Noreturn void fail(int report, const char *step, int err) {
    uint8_t buf[64];
    struct writer w = writer_of(buf, sizeof buf);
    put_u32(&w, (uint32_t)(err ? err : EIO));
    put_bytes(&w, step, strlen(step));
    ssize_t ignored = send(report, buf, w.len, MSG_NOSIGNAL);
    (void)ignored;
    _exit(71);
}

/* 0, 1, 2 on /dev/null, 3 the listener, init's own file and the report above; nothing else. */
static int arrange_descriptors(const struct spawner *s, int listener, int *report, int *exe) {
    enum { SAFE = 8 }; /* above all that are overwritten */
    int init = fcntl(s->init_exe, F_DUPFD_CLOEXEC, SAFE), pipe_ = fcntl(*report, F_DUPFD_CLOEXEC, SAFE);
    int net = fcntl(listener, F_DUPFD_CLOEXEC, SAFE), null = fcntl(s->null, F_DUPFD_CLOEXEC, SAFE);
    if (init < 0 || pipe_ < 0 || net < 0 || null < 0) return -1;
    for (int fd = 0; fd < 3; fd++)
        if (dup2(null, fd) < 0) return -1;
    if (dup2(net, 3) < 0) return -1;
    int kept[] = {3, init, pipe_}; /* wherever they are: the spawner may have had a thousand open */
    keep_only(kept, sizeof kept / sizeof *kept);
    *report = pipe_;
    *exe = init;
    return 0;
}

/* Nobody reads the report any more: the spawner died, and whoever adopts may have looked before we could be seen. */
static bool forsaken(int report) {
    struct pollfd p = {.fd = report};
    return poll(&p, 1, 0) > 0 && p.revents & (POLLERR | POLLHUP);
}

static void exec_init(const struct spawner *s, const struct plan *p, int exe) {
    char id[ID_MAX + 1], oom[16];
    snprintf(id, sizeof id, "%.*s", (int)p->id.n, (const char *)p->id.p);
    /* Commands are always to be killed before init; without CAP_SYS_RESOURCE only their own number can rise. */
    snprintf(oom, sizeof oom, "%d", s->oom_adj < 0 ? 0 : 500);
    char *argv[12] = {"dsec-init", "--id", id, "--oom", oom};
    unsigned n = 5;
    if (s->config.level == LEVEL_CONTAINER) argv[n++] = "--pidns";
    if (s->config.level == LEVEL_PROCESS) argv[n++] = "--scope-signals";
    if (s->config.level == LEVEL_PROCESS && s->root) argv[n++] = "--private-uid";
    char *const env[] = {NULL};
    syscall(SYS_execveat, exe, "", argv, env, AT_EMPTY_PATH);
}

static void work_through(struct child *c, const struct operation *op, int report) {
    for (; op->name; op++)
        if (op->run(c)) fail(report, op->name, errno);
}

static struct child child_new(const struct spawner *s, uint32_t slot) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    umask(022);
    return (struct child){.s = s, .slot = slot, .uid = slot_uid(slot), .proc = -1, .ruleset = -1, .users = -1, .mounts = -1, .dev = -1, .root = -1, .writable = -1};
}

static _Noreturn void become_init(struct child *c, int report) {
    const struct spawner *s = c->s;
    work_through(c, s->config.level == LEVEL_CONTAINER ? container_finish : process_finish, report);
    setpriority(PRIO_PROCESS, 0, 0);
    int exe = -1;
    if (arrange_descriptors(s, c->p->listener, &report, &exe)) fail(report, "descriptors", errno);
    if (forsaken(report)) _exit(71);
    if (confine_rlimits(c->p->open_files)) fail(report, "resource limits", errno); /* after the descriptors that lie above it */
    if (confine_seccomp(s->config.level)) fail(report, "seccomp", errno);
    exec_init(s, c->p, exe);
    fail(report, "exec init", errno);
}

static void prepare(struct child *c, int report) {
    work_through(c, c->s->config.level == LEVEL_CONTAINER ? container_prepare : process_prepare, report);
}

void child_direct(const struct spawner *s, uint32_t slot, const struct plan *p, int report) {
    struct child c = child_new(s, slot);
    prepare(&c, report);
    c.p = p;
    become_init(&c, report);
}

void child_seed(const struct spawner *s, uint32_t slot, int users, int report) {
    static uint8_t body[MESSAGE_MAX];
    static struct plan plan;
    int fds[FDS_MAX];
    unsigned n = FDS_MAX;
    struct child c = child_new(s, slot);
    c.users = users;
    c.joined = true;
    prctl(PR_SET_NAME, "dsec-seed");
    prepare(&c, report);
    ssize_t size = send(report, "r", 1, MSG_NOSIGNAL) == 1 ? receive_fds(report, body, sizeof body, fds, &n, 0) : 0;
    if (size <= 0) _exit(0); /* not needed, or the spawner is gone */
    setpriority(PRIO_PROCESS, 0, URGENT);
    struct reader r = reader_of(body, (size_t)size);
    if (!parse_create(&r, &plan, fds, n)) fail(report, "malformed", EPROTO);
    c.p = &plan;
    become_init(&c, report);
}
