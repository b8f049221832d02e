/* A new spawner takes over what an older one of the same engine left running: the cgroups tell. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawner.h"

/* The id in the command line of an init of ours; init's memory is not readable, let alone writable, for what it runs. */
static bool init_id(const struct spawner *s, pid_t pid, char *id, size_t cap) {
    char path[48], text[512];
    snprintf(path, sizeof path, "%d/cmdline", pid);
    static const char head[] = "dsec-init\0--id";
    if (read_at(s->proc, path, text, sizeof text) <= (long)sizeof head || memcmp(text, head, sizeof head)) return false;
    return snprintf(id, cap, "%s", text + sizeof head) < (int)cap;
}

/* The parent of a process, or -1. */
static pid_t parent_of(const struct spawner *s, pid_t pid) {
    char path[48], text[512];
    snprintf(path, sizeof path, "%d/stat", pid);
    if (read_at(s->proc, path, text, sizeof text) <= 0) return -1;
    char state;
    int parent;
    const char *rest = strrchr(text, ')'); /* the name before it may hold anything */
    return rest && sscanf(rest + 1, " %c %d", &state, &parent) == 2 ? parent : -1;
}

static bool in_slot(const struct spawner *s, pid_t pid, uint32_t slot) {
    char path[48], text[4096], wanted[192];
    snprintf(path, sizeof path, "%d/cgroup", pid);
    snprintf(wanted, sizeof wanted, "/%.120s/s%u\n", s->groups[s->n_groups - 1].name, slot);
    return pid > 0 && read_at(s->proc, path, text, sizeof text) > 0 && strstr(text, wanted);
}

/* Any process may call itself what init is called. But whatever runs in a sandbox descends from its init and stays below it:
 * init alone has a parent outside. */
static bool is_init(const struct spawner *s, pid_t pid, uint32_t slot, char *id, size_t cap) {
    pid_t parent = parent_of(s, pid);
    return parent >= 0 && !in_slot(s, parent, slot) && in_slot(s, pid, slot) && init_id(s, pid, id, cap);
}

static bool adopt(struct spawner *s, pid_t pid, uint32_t slot) {
    char id[ID_MAX + 1], again[ID_MAX + 1];
    if (!is_init(s, pid, slot, id, sizeof id)) return false;
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0 && errno != ESRCH) die("adopt"); /* it runs: who cannot hold it must not end it either */
    if (pidfd < 0) return false;
    struct span name = {.p = (uint8_t *)id, .n = (uint32_t)strlen(id)};
    /* Read again behind the pidfd: the pid now means what it meant. */
    if (!is_init(s, pid, slot, again, sizeof again) || strcmp(id, again) || table_by_id(s, name)) {
        close(pidfd);
        return false;
    }
    struct sandbox *sb = table_add(s, name, pid);
    sb->pidfd = pidfd;
    sb->slot = slot;
    sb->state = S_RUNNING;
    char path[64], text[64] = "";
    for (unsigned i = 0; i < s->n_groups; i++) {
        snprintf(path, sizeof path, "s%u/%s", slot, s->groups[i].v2 ? "cgroup.freeze" : "freezer.state");
        if (s->groups[i].controls & C_FREEZE && read_at(s->groups[i].dir, path, text, sizeof text) > 0)
            sb->frozen = text[0] == '1' || !strncmp(text, "FR", 2);
    }
    watch_pidfd(s, sb);
    return true;
}

/* Calls `each` for the processes of a slot until it says true; how many it was called for, or -1 - that when it said so. */
static long each_process(struct spawner *s, uint32_t slot, bool (*each)(struct spawner *, pid_t, uint32_t)) {
    char path[64], line[32];
    snprintf(path, sizeof path, "s%u/cgroup.procs", slot);
    int fd = openat(s->groups[s->n_groups - 1].dir, path, O_RDONLY | O_CLOEXEC);
    FILE *pids = fd < 0 ? NULL : fdopen(fd, "r");
    long n = 0;
    bool found = false;
    while (pids && !found && fgets(line, sizeof line, pids)) {
        n++;
        found = each(s, (pid_t)strtol(line, NULL, 10), slot);
    }
    if (pids) fclose(pids);
    return found ? -1 - n : n;
}

static bool end_one(struct spawner *s, pid_t pid, uint32_t slot) {
    (void)s;
    (void)slot;
    if (pid > 0) kill(pid, SIGKILL);
    return false;
}

/* Processes without their init: nobody would ever end them, and the next sandbox would share its ids with them. */
static void end_orphans(struct spawner *s, uint32_t slot) {
    char path[64];
    const struct hierarchy *h = &s->groups[s->n_groups - 1];
    slot_freeze(s, slot, false);
    for (int tries = 0; tries < 2000; tries++) {
        snprintf(path, sizeof path, "s%u/cgroup.kill", slot);
        if (h->v2) write_at(h->dir, path, "1");
        if (!each_process(s, slot, end_one)) return;
        usleep(1000);
    }
    note("processes outlive their sandbox", "", EBUSY);
}

static bool anyone(struct spawner *s, pid_t pid, uint32_t slot) {
    (void)s;
    (void)pid;
    (void)slot;
    return true;
}

/* The lock of its block says that no other spawner holds it. One that was killed may have left children that are on their way
 * out, or to being init, and hold it a moment longer. */
static bool take(struct spawner *s, uint32_t slot) {
    for (int tries = 0; tries < 1000; tries++) {
        if (slot_take(s, slot)) return true;
        usleep(2000);
    }
    note("the ids of a sandbox are held by somebody else", "", EBUSY);
    return false;
}

static void adopt_slot(struct spawner *s, int dir, const char *name) {
    (void)dir;
    uint32_t slot = (uint32_t)strtoul(name + 1, NULL, 10);
    if (!each_process(s, slot, anyone) || !take(s, slot)) return;
    if (each_process(s, slot, adopt) < 0) return;
    end_orphans(s, slot);
    slot_at(s, slot)->used = slot_at(s, slot)->made = false;
}

static void each_slot(struct spawner *s, int parent, void (*each)(struct spawner *, int, const char *)) {
    int fd = openat(parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) return;
    for (struct dirent *e; (e = readdir(dir));)
        if (e->d_name[0] == 's' && e->d_name[1] >= '0' && e->d_name[1] <= '9') each(s, parent, e->d_name);
    closedir(dir);
}

/* Directories that nothing runs in are removed; this fails for the others, as it should. */
static void remove_empty(struct spawner *s, int parent, const char *name) {
    (void)s;
    unlinkat(parent, name, AT_REMOVEDIR);
}

void adopt_running(struct spawner *s) {
    if (!s->n_groups) return;
    each_slot(s, s->groups[s->n_groups - 1].dir, adopt_slot);
    for (unsigned i = 0; i < s->n_groups; i++) each_slot(s, s->groups[i].dir, remove_empty);
}
