/* One exec, shared by exec.c (life), stream.c (output and input) and start.c (from request to process). */
#ifndef DSEC_EXEC_H
#define DSEC_EXEC_H

#include "init.h"
#include "ring.h"

enum exec_state { RUNNING, DRAINING, ENDED };

struct stream {
    struct io io;
    uint64_t total, sent;            /* bytes read from the command, next offset to send */
    uint64_t remain;                 /* DRAINING: bytes that were in the pipe when the command ended */
    struct ring ring;
    bool done, enlarged;
    int writer;                      /* of the pipe, kept open while the command runs: the end is not an event of its own */
};

struct input {
    struct io io;                    /* the pipe's write end; the master for a pty */
    uint8_t *buf;
    size_t off, len, cap;
    bool end;                        /* close when buf is empty */
};

struct exec {
    struct exec *prev, *next;        /* active: RUNNING or DRAINING, or attached */
    struct exec *all_prev, *all_next;
    struct exec *release_next;
    bool releasing;                  /* its monitor is told to go after this turn's frames were sent */
    uint8_t id[ID_LIMIT];
    uint8_t id_n;
    bool active, pty, lost;
    bool waits;                      /* its monitor waits for another command */
    bool late;                       /* STARTED may come with what follows it */
    bool announced;                  /* STARTED was sent on the channel */
    uint8_t kill_reason;             /* 0, 1 timeout, 2 SIGNAL: a kill was asked for */
    enum exec_state state;
    pid_t pid;
    struct monitor monitor;          /* its descriptor is in `control` */
    struct io control;
    struct stream s[2];
    struct input in;
    struct channel *channel;
    uint64_t started, deadline, grace;
    uint64_t announce_by;            /* STARTED is sent at this time at the latest */
    uint64_t obeyed_by;              /* a monitor that has not killed its tree by then has lost it */
    int64_t started_real;
    uint8_t how, reason;
    int32_t code;
    bool reaped;                     /* init reaped the leader itself, with this status */
    int status;
    struct tree_usage usage;
    uint64_t wall;
};

/* start.c: returns 0 with the monitor and descriptors set, or an errno. */
int exec_launch(struct exec *e, const struct request *q);
uint32_t execs_running(void);

/* exec.c */
void exec_announce(struct exec *e);  /* before anything else is sent on its channel */

/* stream.c */
bool streams_pump(struct exec *e);
bool streams_done(const struct exec *e);
void streams_send_ends(struct exec *e);
void streams_leader_ended(struct exec *e);
void streams_free(struct exec *e);
void input_pump(struct exec *e);
bool input_add(struct exec *e, struct span data, bool end);
void input_close(struct exec *e);
bool drains_pump(void);
void drain_adopt(struct io *io);

#endif
