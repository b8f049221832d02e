/* A new spawner takes over what an older one of the same engine left running: the cgroups tell. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
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

static void adopt(struct spawner *s, pid_t pid, uint32_t slot) {
    char id[ID_MAX + 1], again[ID_MAX + 1];
    if (!init_id(s, pid, id, sizeof id)) return;
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0) return;
    struct span name = {.p = (uint8_t *)id, .n = (uint32_t)strlen(id)};
    /* Read again behind the pidfd: the pid now means what it meant. */
    if (!init_id(s, pid, again, sizeof again) || strcmp(id, again) || table_by_id(s, name) || !slot_take(s, slot)) {
        close(pidfd);
        return;
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
}

static void adopt_slot(struct spawner *s, int dir, const char *name) {
    char path[64], pids[65536];
    snprintf(path, sizeof path, "%.30s/cgroup.procs", name);
    if (read_at(dir, path, pids, sizeof pids) <= 0) return;
    for (char *line = pids, *end; *line; line = end + 1) {
        long pid = strtol(line, &end, 10);
        if (end == line) break;
        adopt(s, (pid_t)pid, (uint32_t)strtoul(name + 1, NULL, 10));
        if (*end != '\n') break;
    }
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
