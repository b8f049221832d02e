/* The monitor: parent of one command, subreaper of all it forks. It is a fork of init and reports on its control
 * socket; it is told R (release: the command's end was recorded) or K (kill the tree). End of file means that init died. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "init.h"

#define CONTROL 3
#define RULES 4
#define KILL_FOR 2000000000ull       /* ns of killing before init is asked to end everything */
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

static void report(uint32_t what, int value, bool killed, const struct tree_usage *usage) {
    struct report r = {.what = what, .value = value, .killed = killed};
    if (usage)
        r.usage = *usage;
    while (send(CONTROL, &r, sizeof r, MSG_NOSIGNAL) < 0 && errno == EINTR)
        ;
}

static void place_descriptors(const struct plan *p) {
    int rules = sv.landlock;
    if (rules == CONTROL || p->control <= RULES)
        _exit(127);
    dup2(p->in, 0);
    dup2(p->out, 1);
    dup2(p->err, 2);
    dup3(p->control, CONTROL, O_CLOEXEC);
    if (rules >= 0 && rules != RULES)
        dup3(rules, RULES, O_CLOEXEC);
    unsigned first = rules >= 0 ? RULES + 1 : RULES;
    if (syscall(SYS_close_range, first, ~0u, 0) != 0)
        for (unsigned fd = first; fd < 65536; fd++)
            close((int)fd);
}

static void write_oom(void) {
    if (sv.oom == INT32_MIN)
        return;
    char text[16];
    int n = snprintf(text, sizeof text, "%d", sv.oom);
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t ignored = write(fd, text, (size_t)n);
        (void)ignored;
        close(fd);
    }
}

static bool become(const struct plan *p) {
    if (!sv.privileged)
        return true; /* init refused every other identity before */
    return setgroups(p->ngroups, p->groups) == 0 && setresgid(p->gid, p->gid, p->gid) == 0 &&
           setresuid(p->uid, p->uid, p->uid) == 0;
}

static void limit_files(const struct plan *p) {
    struct rlimit l = sv.nofile;
    if (p->nofile) {
        rlim_t n = p->nofile < l.rlim_max ? p->nofile : l.rlim_max;
        l = (struct rlimit){n, n};
    }
    setrlimit(RLIMIT_NOFILE, &l);
}

/* Tries every directory of PATH; a permission error is remembered, as shells do. Returns errno. */
static int exec_by_path(const struct plan *p, char *buf) {
    int err = ENOENT;
    const char *name = p->argv[0];
    size_t name_n = strlen(name);
    if (name_n == 0 || name_n > 255)
        return name_n ? ENAMETOOLONG : ENOENT;
    for (const char *dir = p->path ? p->path : DEFAULT_PATH; dir; dir = strchr(dir, ':') ? strchr(dir, ':') + 1 : NULL) {
        size_t n = strcspn(dir, ":");
        if (n + name_n + 2 > PATH_LIMIT)
            continue;
        memcpy(buf, dir, n);
        if (n)
            buf[n++] = '/';
        memcpy(buf + n, name, name_n + 1);
        execve(buf, p->argv, p->envp);
        if (errno == EACCES)
            err = EACCES;
        else if (errno != ENOENT && errno != ENOTDIR)
            return errno;
    }
    return err;
}

/* In the vforked child: memory is shared with the monitor, which waits. Returns the errno of what failed. */
static int become_command(const struct plan *p, char *buf) {
    sigset_t none;
    sigemptyset(&none);
    setsid();
    if (p->pty && ioctl(0, TIOCSCTTY, 0) != 0)
        return errno;
    write_oom();
    limit_files(p);
    if (!become(p))
        return errno;
    umask(022);
    if (p->cwd[0] && chdir(p->cwd) != 0)
        return errno;
    if (sv.landlock >= 0 && syscall(SYS_landlock_restrict_self, RULES, 0) != 0)
        return errno;
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (!strchr(p->argv[0], '/'))
        return exec_by_path(p, buf);
    execve(p->argv[0], p->argv, p->envp);
    return errno;
}

static pid_t start(const struct plan *p, int *failed) {
    static char buf[PATH_LIMIT + 1];
    volatile int err = 0;
    pid_t pid = vfork();
    if (pid == 0) {
        err = become_command(p, buf);
        _exit(127);
    }
    *failed = pid < 0 ? errno : err;
    return pid;
}

/* Reaps orphans. True: the command has ended; it stays a zombie, so that its pid is not used again. */
static bool command_ended(pid_t leader, int *status, struct tree_usage *usage) {
    for (;;) {
        siginfo_t info = {0};
        struct rusage ru;
        memset(&ru, 0, sizeof ru);
        long r = syscall(SYS_waitid, P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT, &ru);
        if (r != 0 || info.si_pid == 0)
            return false;
        if (info.si_pid != leader) {
            waitpid(info.si_pid, NULL, WNOHANG);
            continue;
        }
        *status = info.si_code == CLD_EXITED ? (info.si_status & 255) << 8 : info.si_status & 127;
        usage_add(usage, &ru);
        return true;
    }
}

static _Noreturn void kill_tree(pid_t leader, int status) {
    struct tree_usage usage = {0};
    if (!tree_kill(now_ns() + KILL_FOR, leader, &status, &usage)) {
        report(REPORT_ESCALATE, 0, false, NULL);
        tree_kill(NEVER, leader, &status, &usage);
    }
    report(REPORT_ENDED, status, true, &usage);
    _exit(0);
}

static void follow(pid_t leader) {
    int status = SIGKILL;
    bool ended = false;
    struct tree_usage usage = {0};
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGTERM);
    for (;;) {
        if (!ended && command_ended(leader, &status, &usage)) {
            ended = true;
            report(REPORT_ENDED, status, false, &usage);
        }
        struct pollfd control = {.fd = CONTROL, .events = POLLIN};
        if (ppoll(&control, 1, NULL, &mask) <= 0)
            continue;
        char order = 0;
        ssize_t n = recv(CONTROL, &order, 1, MSG_DONTWAIT);
        if (n == 1 && order == 'R')
            _exit(0);
        if (n == 0 || (n == 1 && order == 'K'))
            kill_tree(leader, status);
    }
}

_Noreturn void monitor_run(struct plan *p) {
    place_descriptors(p);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_NAME, "monitor", 0, 0, 0);
    int failed;
    pid_t pid = start(p, &failed);
    if (failed) {
        report(REPORT_FAILED, failed, false, NULL);
        _exit(0);
    }
    report(REPORT_STARTED, pid, false, NULL);
    close(0);
    close(1);
    close(2);
    follow(pid);
    _exit(0);
}
