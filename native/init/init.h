/* Shared types of init: one thread, one epoll loop, one engine connection at a time.
 *
 * Descriptors are registered edge-triggered; a `struct io` remembers that its descriptor may be ready until the code
 * that drains it sees EAGAIN. Events only set flags; the work is done afterwards, walking the lists below, one chunk
 * of every source per turn, so no object is freed while an event can still name it and nobody starves. */
#ifndef DSEC_INIT_H
#define DSEC_INIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "request.h"

#define CHUNK (FRAME_MAX - 8u)       /* stream bytes in one DATA frame of an exec */
#define OUT_LIMIT (512u << 10)       /* no request is read while more than this waits to be sent */
#define RUNNING_LIMIT 1024u
#define KEPT_LIMIT 2048u          /* EXECS of so many fits in one frame */
#define CHANNEL_LIMIT 4096u
#define DRAIN_LIMIT 256u
#define NEVER UINT64_MAX

struct io {
    int fd;
    bool in, out;                    /* may be readable, may be writable */
    bool hup;                        /* the other side has closed: reading on finds the end */
};

struct op;
struct exec;

struct channel {
    struct channel *next;
    uint32_t id;
    uint64_t credit;                 /* content bytes init may send */
    uint32_t window;                 /* content bytes the engine may send */
    struct op *op;                   /* exactly one of op and exec is set */
    struct exec *exec;
};

/* A running file operation or watch. `pump` does one chunk and says whether it could go on at once; `data` takes file
 * content; `cancel` undoes what is unfinished. `release` frees everything but the struct's own memory. */
struct op_type {
    bool (*pump)(struct op *);
    void (*data)(struct op *, struct span, bool end);
    void (*cancel)(struct op *);
    void (*release)(struct op *);
};

struct op {
    struct op *prev, *next;
    struct channel *channel;
    const struct op_type *type;
};

struct server {
    int epoll;
    struct io listener;
    bool pidns, private_uid, scope_signals, privileged;
    int landlock;                    /* rule set that scopes signals, or -1 */
    int oom;                         /* oom_score_adj of commands; INT32_MIN leaves it */
    uid_t uid;
    gid_t gid;
    struct rlimit nofile;            /* as it was when init started */
    bool killing;                    /* every process of the sandbox is being ended */
    uint64_t kill_again;             /* monotonic ns of the next round */
    struct op *ops;
    bool spare_wanted;               /* an engine has come: its first command should find a monitor waiting */
    bool fresh;                      /* the connection is new: HELLO comes first */
    uint8_t *scratch;                /* SCRATCH bytes, given back to the kernel when idle */
    bool blocked;                    /* a source had to wait for the connection this turn */
    bool busy;                       /* there is memory, or a spare monitor, to give back when idle */
};

/* As getdents64 writes it; buffers of it are aligned for it. */
struct dirent_raw {
    uint64_t ino;
    int64_t off;
    uint16_t reclen;
    uint8_t type;
    char name[];
};

#define SCRATCH (FRAME_MAX + FRAME_HEAD)

extern struct server sv;

/* main.c */
uint64_t now_ns(void);
void io_watch(struct io *io, int fd, uint32_t events);   /* EPOLLIN and these */
void io_want_out(struct io *io, bool want);     /* be told when it becomes writable, or not */
void io_close(struct io *io);
int io_leave(struct io *io);         /* no longer watched; the descriptor stays open */
void io_move(struct io *to, struct io *from);   /* `from` may be freed afterwards */
void shut_down(const char *why);

/* conn.c: the engine's connection and its channels */
void conn_accept(void);
bool conn_read(void);
void conn_flush(void);
void conn_push(void);                /* sends what waits, now; never drops the connection */
void conn_trim(void);                /* gives idle memory back */
void conn_drop(void);
bool conn_can_send(void);            /* connected and nothing is waiting: sources may read */
bool conn_more(void);                /* frames can be read or handled at once */
struct io *conn_io(void);
void send_frame(uint8_t kind, uint8_t flags, uint32_t channel, const void *p, size_t n);
void send_data(uint32_t channel, uint8_t flags, const uint64_t *offset, const void *p, size_t n);
void send_ok(uint32_t channel);
void send_error(uint32_t channel, int err, enum code code, const char *message);
struct channel *channel_open(uint32_t id);   /* NULL after an ERROR was sent */
void channel_free(struct channel *c);
struct channel *channel_find(uint32_t id);

/* dispatch.c */
bool dispatch(const struct frame *f);        /* false: malformed, drop the connection */
struct op *op_new(size_t size, const struct op_type *type, uint32_t channel, uint32_t credit);
void op_end(struct op *op);
void op_fail(struct op *op, int err, enum code code, const char *message);
void op_cancel(struct op *op);
bool ops_pump(void);

/* exec.c */
struct tree_usage {
    uint64_t user_us, system_us, maxrss_kib;
};
void exec_start(const struct request *q);
void exec_attach(const struct request *q);
void exec_signal(const struct request *q);
void exec_winsize(const struct request *q);
void exec_forget(const struct request *q);
void exec_list(uint32_t channel);
void exec_shift(uint64_t ms);
void exec_detach(struct exec *e);
bool exec_input(struct exec *e, struct span data, bool end);
bool execs_pump(void);
void execs_monitors(void);
void execs_timers(uint64_t now);
uint64_t execs_next_timer(void);
void execs_reaped(pid_t pid, int status, const struct rusage *ru);
void execs_all_dead(void);
void execs_release(void);
uint32_t execs_kept(void);
void execs_carried(struct tree_usage *sum);   /* used before by monitors that now have an exec */
void kill_everything(void);
void drain_oldest(void);

/* tree.c: process trees, by /proc */
/* Kills every process below the caller until none is left (true) or `until` (monotonic ns) has passed. */
bool tree_kill(uint64_t until, pid_t leader, int *leader_status, struct tree_usage *usage);
void tree_kill_once(void);
uint32_t tree_count(void);
void usage_add(struct tree_usage *u, const struct rusage *ru);
void usage_join(struct tree_usage *u, const struct tree_usage *more);

/* path.c: the file-system identity and resolution */
int identity_enter(uint32_t uid, uint32_t gid);   /* 0, or -1 with errno */
void identity_leave(void);
int identity_become(uint32_t uid, uint32_t gid);  /* for ever; in a worker */
void path_copy(char out[PATH_LIMIT + 1], struct span s);
int open_path(int base, const char *path, int flags, mode_t mode, bool beneath);
int open_parent(int base, const char *path, bool beneath, char name[256]);
int make_parents(int base, const char *path, bool beneath);
int make_dirs(int base, const char *path, mode_t mode, bool beneath, bool final_too);
void put_entry(struct writer *w, const char *name, const struct stat *st, const char *target);
size_t read_link(int dirfd, const char *name, char out[PATH_LIMIT + 1]);
uint8_t type_of(mode_t mode);
struct timespec time_of(int64_t ns);
void proc_fd_path(char out[32], int fd);

/* file.c */
void file_read(const struct request *q);
void file_write(const struct request *q);

/* dir.c */
void dir_list(const struct request *q);
void path_stat(const struct request *q);
void path_mkdir(const struct request *q);
void path_rename(const struct request *q);
void path_setattr(const struct request *q);

/* batch.c, worker.c, watch.c */
void batch_start(const struct request *q);
void path_remove(const struct request *q);
void tree_start(const struct request *q);
void worker_read(const struct request *q);
void workers_reaped(pid_t pid, int status);
void watch_start(const struct request *q);

/* remove.c, walk.c: run in a worker; the result is an errno */
int remove_tree(int dirfd, const char *name);
int walk_tree(int root, const struct stat *st, uint64_t max_bytes, uint32_t max_entries, int out);

/* spare.c: monitors that wait for a command */
struct monitor {
    int control;
    pid_t pid;
    struct tree_usage before;        /* of its earlier commands: counted by init until init reaps it */
};
bool spare_take(struct monitor *m);
void spare_offer(const struct monitor *m);    /* it waits; kept, or let go */
void spare_make(void);
void spares_let_go(void);
void spares_reaped(pid_t pid);
uint32_t spares_count(void);
void spares_carried(struct tree_usage *sum);

/* start.c */
struct plan;
struct plan *plan_new(const struct request *q);
bool exec_late(const struct request *q);      /* STARTED may be held back */
int monitor_fork(struct plan *first, struct monitor *m);   /* 0 or an errno; without a plan it waits for one */

/* monitor.c */
#define PLAN_MESSAGE 65536u          /* an EXEC payload up to this is handed to a waiting monitor */
#define ORDER_SIZE 3
#define ORDER_GO 'R'                 /* the command's end was recorded: the monitor exits */
#define ORDER_KILL 'K'
#define ORDER_SIGNAL 'S'             /* then the signal, and 1 when it is for the command's process group */
#define ORDER_RUN 'P'                /* then the EXEC payload; descriptors 0, 1 and 2 of the command come along */
struct plan {
    char **argv, **envp;
    char *path;                      /* PATH of envp */
    char cwd[PATH_LIMIT + 1];
    uint32_t uid, gid, ngroups;
    gid_t groups[GROUPS_LIMIT];
    uint64_t nofile;
    bool pty, late;
    int in, out, err;
};
/* After DONE and FAILED the monitor waits for the next command; after ENDED others of its tree live on. */
enum { REPORT_STARTED = 1, REPORT_FAILED, REPORT_DONE, REPORT_ENDED, REPORT_KILLED, REPORT_ESCALATE };
struct report {
    uint32_t what;
    int32_t pid;                     /* of the command */
    int32_t value;                   /* errno, or wait status */
    struct tree_usage usage;
};
_Noreturn void monitor_run(int control, struct plan *first);

#endif
