/* spawner --level container|process --state DIR --init FILE [--durable] [--uids DIR] [--cgroup SPEC]... [--readable PATH]...
 *
 * Descriptor 3 is a listening SEQPACKET socket, 4 (unless --durable) a pipe whose other end its owner holds: when that
 * closes, however the owner died, everything is ended. */
#include <errno.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawner.h"

/* A sealed copy: nothing that reaches it through /proc can change what the next sandbox runs. */
static int sealed_copy(const char *path) {
    int from = open(path, O_RDONLY | O_CLOEXEC);
    int to = (int)syscall(SYS_memfd_create, "dsec-init", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct stat st;
    if (from < 0 || to < 0 || fstat(from, &st)) die(path);
    for (off_t at = 0; at < st.st_size;)
        if (sendfile(to, from, &at, (size_t)(st.st_size - at)) <= 0) die(path);
    close(from);
    if (fchmod(to, 0555) || fcntl(to, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)) die("seal init");
    return to;
}

/* What init has, by inheritance: the least that leaves it killable. Without CAP_SYS_RESOURCE there is no lowering.
 *
 * Written in the old scale (-16 of -17). A privileged write in the new one would also become the least that every later
 * child of ours may set for itself, and so exempt a sandbox's commands from the machine's OOM killer. */
static int lowest_oom_adj(const struct spawner *s) {
    char text[16];
    if (!write_at(s->proc, "self/oom_adj", "-16")) return 0;
    if (read_at(s->proc, "self/oom_score_adj", text, sizeof text) <= 0) die("oom score");
    return atoi(text);
}

static void parse(struct spawner *s, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (!strcmp(name, "--durable")) {
            s->config.durable = true;
            continue;
        }
        const char *value = ++i < argc ? argv[i] : NULL;
        if (!value) die("missing value");
        if (!strcmp(name, "--level")) s->config.level = strcmp(value, "process") ? LEVEL_CONTAINER : LEVEL_PROCESS;
        else if (!strcmp(name, "--state")) s->config.state = value;
        else if (!strcmp(name, "--init")) s->config.init_path = value;
        else if (!strcmp(name, "--uids")) s->config.uids = value;
        else if (!strcmp(name, "--cgroup")) cgroups_add(s, value);
        else if (!strcmp(name, "--readable") && s->config.n_readable < READABLE_MAX) s->config.readable[s->config.n_readable++] = value;
        else die(name);
    }
    if (!s->config.state || !s->config.init_path) die("--state and --init are needed");
}

/* One that is adopted takes a descriptor. */
static void raise_files(void) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files)) return;
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

static void prepare(struct spawner *s) {
    raise_files();
    s->root = geteuid() == 0;
    s->proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
    s->null = open("/dev/null", O_RDWR | O_CLOEXEC);
    s->uid_locks = s->config.uids ? open(s->config.uids, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (s->proc < 0 || s->null < 0 || (s->config.uids && s->uid_locks < 0)) die("open");
    s->init_exe = sealed_copy(s->config.init_path);
    s->oom_adj = lowest_oom_adj(s);
    fcntl(3, F_SETFD, FD_CLOEXEC);
    fcntl(4, F_SETFD, FD_CLOEXEC);
    /* Whoever reads what our starter's output goes to must not wait for us. */
    if (dup2(s->null, 0) < 0 || dup2(s->null, 1) < 0) die("standard input and output");
}

/* One that outlives its engine is nobody's child: no engine must stay, or keep count, to bury it. */
static void leave_parent(void) {
    pid_t pid = fork();
    if (pid < 0) die("fork");
    if (pid > 0) _exit(0);
}

int main(int argc, char **argv) {
    struct spawner s = {.listener = 3, .lifeline = 4, .owner = -1};
    /* What our starter had open besides is none of ours, nor of any sandbox. */
    syscall(SYS_close_range, 5, ~0u, 0);
    parse(&s, argc, argv);
    if (s.config.durable) leave_parent();
    setsid();
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    umask(077);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    /* Sandboxes must not possess the session keyring of whoever started us. */
    syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL);
    prepare(&s);
    if (s.config.level == LEVEL_CONTAINER) world_enter(&s);
    else prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    /* Under load everything waits for this path; children go back to normal. */
    setpriority(PRIO_PROCESS, 0, URGENT);
    umask(0);
    loop_run(&s);
}
