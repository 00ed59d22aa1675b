/* Heartbeats between nodes, by one native thread that never takes the GIL.
 *
 * At every period the thread sends its own beat to those who observe us, reads what has come on the peers'
 * stripes, and looks whose silence has reached the limit that was set for it. It wakes Python, by an eventfd,
 * only when there is something to judge. What came since is kept in a table until Python takes it.
 *
 * It is not woken by a beat that comes: the kernel stamps the time of arrival, so one wake-up a period serves
 * all peers, and a thread that was kept from running does not see its own delay as theirs. Nobody is judged
 * but by a round that has read all stripes.
 *
 * Beside a stripe there may be a way (beat_way.h): there a beat is written over the one before, in the memory of who
 * observes, so numbers only grow, and the time of arrival is that of the round that has found it. Beats go by the
 * stripe as well until the first by the way has arrived, and whenever two have not: it costs no beat that a way fails.
 */
#ifndef ZBMD_HEARTBEAT_H
#define ZBMD_HEARTBEAT_H

#include "beat.h"
#include "transport/rdma/native/beat_way.h"
#include "transport/native/life.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ZBMD_BEAT_PEERS 64       /* at most ten are observed and ten observe us; others are on their way out */
#define ZBMD_BEAT_ARRIVALS 128   /* kept for Python, the newest: more than come while a lease lasts */
#define ZBMD_BEAT_READS 8        /* of one stripe in a row */
#define ZBMD_BEAT_SPARED_MAX 4   /* in a row, to a peer that was just sent something else */
#define ZBMD_BEAT_BEHIND 2       /* so many by a way have not arrived: the stripe helps out */
#define ZBMD_BEAT_LOOKS 4        /* in a row, at one that is just being written */
#define ZBMD_BEAT_TORN_MAX 16    /* rounds in a row that found no whole beat in what was written */

/* What every round looks at comes first: it finds a cold cache. */
struct zbmd_beat_peer {
    int fd;                        /* of its stripe; -1 for none */
    uint32_t observes_us;          /* whether we beat to it */
    uint32_t spared;
    uint32_t silent;               /* whether Python was woken for its silence */
    uint32_t fresh;                /* whether it has beaten since Python took what there was */
    uint32_t end;
    uint32_t taken;
    uint32_t arrived;
    uint64_t limit_ns;             /* the silence that Python is woken for; 0 if we do not observe it */
    uint64_t last_ns;              /* when it was last heard */
    uint64_t sent_ns;              /* when something else was sent to it */
    uint64_t said_known, said_entered;
    struct zbmd_beat_writer writer;
    struct zbmd_beat_reader reader;
    struct zbmd_beat_way *way;     /* beside the stripe; NULL for none */
    uint32_t way_sends;            /* whether the peer takes our beats by it */
    uint32_t way_proven;           /* whether one has arrived */
    uint32_t way_end, way_torn;
    uint64_t way_key[2], way_number;   /* of the peer's: the key, and the last one's number */
    struct zbmd_beat_writer way_writer;
    int error;
    uint64_t arrivals[ZBMD_BEAT_ARRIVALS];
};

struct zbmd_beats {
    pthread_mutex_t lock;   /* of all that follows */
    pthread_t thread;
    int wake_fd, tell_fd;
    uint32_t running, stop;
    uint32_t on;            /* whether we are a member, and beat */
    uint32_t attentive;     /* whether Python is woken for every beat */
    uint32_t lapsed;        /* whether a beat was withheld since Python's last sign of life */
    uint64_t period_ns, lease_until_ns;
    uint64_t known, entered;
    uint64_t read_ns;       /* all that had come by then was read */
    uint64_t judged_ns;     /* the same, of a round that came when it should */
    uint64_t beats_sent, beats_spared;
    uint64_t way_alone, way_come;         /* beats that were sent by a way and not by the stripe; that have come by one */
    uint32_t count;                       /* of places that are taken: */
    uint8_t taken[ZBMD_BEAT_PEERS];
    struct zbmd_beat_peer peers[ZBMD_BEAT_PEERS];
};

/* What Python takes of one peer. */
struct zbmd_beat_news {
    uint32_t fresh, end, way_end, count;
    int error;
    uint64_t known, entered;
    uint64_t arrivals[ZBMD_BEAT_ARRIVALS];
};

static inline void zbmd_stripe_ended(struct zbmd_beat_peer *peer, uint32_t end, int error) {
    close(peer->fd);
    peer->fd = -1;
    peer->end = end;
    peer->error = error;
    peer->way = NULL;
}

static inline void zbmd_way_ended(struct zbmd_beat_peer *peer, uint32_t end) {
    peer->way = NULL;
    peer->way_end = end;
}

static inline void zbmd_beat_arrived(struct zbmd_beat_peer *peer, uint64_t at_ns) {
    if (!peer->limit_ns || at_ns <= peer->last_ns) return;
    peer->last_ns = at_ns;
    peer->arrivals[peer->arrived++ % ZBMD_BEAT_ARRIVALS] = at_ns;
}

/* When the kernel had it, on the monotonic clock; the wall clock may have been set meanwhile. */
static inline uint64_t zbmd_arrival_ns(struct msghdr *message, uint64_t since_ns, uint64_t now_ns,
                                       int64_t wall_ahead_ns) {
    for (struct cmsghdr *each = CMSG_FIRSTHDR(message); each; each = CMSG_NXTHDR(message, each)) {
        if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_TIMESTAMPNS) continue;
        struct timespec wall;
        memcpy(&wall, CMSG_DATA(each), sizeof wall);
        int64_t at_ns = (int64_t)wall.tv_sec * 1000000000 + wall.tv_nsec - wall_ahead_ns;
        if (at_ns < (int64_t)since_ns) return since_ns;
        return at_ns < (int64_t)now_ns ? (uint64_t)at_ns : now_ns;
    }
    return now_ns;
}

static void zbmd_beats_read_stripe(struct zbmd_beats *beats, struct zbmd_beat_peer *peer, uint64_t now_ns,
                                 int64_t wall_ahead_ns) {
    uint8_t data[8 * ZBMD_BEAT_BYTES];
    union { char bytes[CMSG_SPACE(sizeof(struct timespec))]; struct cmsghdr aligned; } control;
    struct iovec piece = {.iov_base = data, .iov_len = sizeof data};
    for (int i = 0; i < ZBMD_BEAT_READS && peer->fd >= 0; i++) {
        struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.bytes,
                                 .msg_controllen = sizeof control.bytes};
        ssize_t taken = recvmsg(peer->fd, &message, MSG_DONTWAIT);
        if (taken < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (taken <= 0) {
            zbmd_stripe_ended(peer, taken ? ZBMD_STRIPE_BROKEN : ZBMD_STRIPE_CLOSED, taken ? errno : 0);
            return;
        }
        uint64_t before = peer->reader.number;
        int end = zbmd_beat_read(&peer->reader, data, (size_t)taken);
        if (peer->reader.number != before) {
            zbmd_beat_arrived(peer, zbmd_arrival_ns(&message, beats->read_ns, now_ns, wall_ahead_ns));
            peer->fresh = 1;
        }
        if (end != ZBMD_STRIPE_OPEN) zbmd_stripe_ended(peer, (uint32_t)end, 0);
        if (taken < (ssize_t)sizeof data) return;
    }
}

/* What has been written by the way since the last look. It may be half a beat: then the next look finds it whole. */
static void zbmd_beats_read_way(struct zbmd_beats *beats, struct zbmd_beat_peer *peer, uint64_t now_ns) {
    uint64_t words[ZBMD_WAY_BEAT_WORDS];
    const uint8_t *beat = (const uint8_t *)words;
    for (int look = 0; look < ZBMD_BEAT_LOOKS; look++) {
        for (int i = 0; i < ZBMD_WAY_BEAT_WORDS; i++) words[i] = __atomic_load_n(&peer->way->inbox[i], __ATOMIC_ACQUIRE);
        uint64_t number = zbmd_read_le64(beat);
        if (number == peer->way_number) return;
        if (zbmd_siphash(peer->way_key, beat, ZBMD_BEAT_TAGGED) != zbmd_read_le64(beat + ZBMD_BEAT_TAGGED)) continue;
        peer->way_torn = 0;
        if (number < peer->way_number) {
            zbmd_way_ended(peer, ZBMD_STRIPE_OUT_OF_TURN);
            return;
        }
        peer->way_number = number;
        peer->reader.known = zbmd_read_le64(beat + 8);
        peer->reader.entered = zbmd_read_le64(beat + 16);
        peer->fresh = 1;
        beats->way_come++;
        zbmd_beat_arrived(peer, now_ns);
        return;
    }
    if (++peer->way_torn == ZBMD_BEAT_TORN_MAX) zbmd_way_ended(peer, ZBMD_STRIPE_FORGED);
}

/* Whether that is enough: else the beat goes by the stripe, too. */
static int zbmd_beats_send_by_way(struct zbmd_beats *beats, struct zbmd_beat_peer *peer) {
    uint64_t words[ZBMD_WAY_BEAT_WORDS];
    if (!peer->way || !peer->way_sends) return 0;
    zbmd_beat_write(&peer->way_writer, beats->known, beats->entered, (uint8_t *)words);
    int behind = peer->way->write(peer->way, words);
    if (behind == ZBMD_WAY_BROKEN) {
        zbmd_way_ended(peer, ZBMD_WAY_FAILED);
        return 0;
    }
    if (peer->way_writer.number > 1 && !behind) peer->way_proven = 1;
    peer->way_writer.number++;
    return peer->way_proven && behind < ZBMD_BEAT_BEHIND;
}

static int zbmd_beats_send_by_stripe(struct zbmd_beats *beats, struct zbmd_beat_peer *peer) {
    uint8_t beat[ZBMD_BEAT_BYTES];
    zbmd_beat_write(&peer->writer, beats->known, beats->entered, beat);
    ssize_t sent = send(peer->fd, beat, sizeof beat, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (sent != sizeof beat) {
        zbmd_stripe_ended(peer, sent < 0 ? ZBMD_STRIPE_BROKEN : ZBMD_STRIPE_FULL, sent < 0 ? errno : 0);
        return 0;
    }
    peer->writer.number++;
    return 1;
}

static void zbmd_beats_send(struct zbmd_beats *beats, struct zbmd_beat_peer *peer, uint64_t now_ns) {
    if (peer->fd < 0 || !peer->observes_us) return;
    int same = peer->said_known == beats->known && peer->said_entered == beats->entered;
    if (same && now_ns - peer->sent_ns < beats->period_ns && peer->spared < ZBMD_BEAT_SPARED_MAX) {
        peer->spared++;
        beats->beats_spared++;
        return;
    }
    if (zbmd_beats_send_by_way(beats, peer)) beats->way_alone++;
    else if (!zbmd_beats_send_by_stripe(beats, peer)) return;
    peer->said_known = beats->known;
    peer->said_entered = beats->entered;
    peer->spared = 0;
    beats->beats_sent++;
}

/* Whether Python must look at this peer now. */
static inline int zbmd_beats_matter(struct zbmd_beats *beats, struct zbmd_beat_peer *peer) {
    if (peer->end != ZBMD_STRIPE_OPEN || peer->way_end != ZBMD_STRIPE_OPEN) return 1;
    if (peer->silent && peer->arrived != peer->taken) return 1;   /* heard again */
    if (!peer->fresh) return 0;
    return beats->attentive || peer->reader.known != beats->known || peer->reader.entered != beats->entered;
}

static inline uint64_t zbmd_beats_due_ns(struct zbmd_beats *beats, uint64_t tick_ns) {
    uint64_t due_ns = tick_ns;
    for (uint32_t i = 0; i < beats->count; i++) {
        struct zbmd_beat_peer *peer = &beats->peers[beats->taken[i]];
        if (!peer->limit_ns || peer->silent) continue;
        if (peer->last_ns + peer->limit_ns < due_ns) due_ns = peer->last_ns + peer->limit_ns;
    }
    return due_ns;
}

/* Read all that has come on every stripe and way. */
static inline void zbmd_beats_read(struct zbmd_beats *beats, uint64_t now_ns) {
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    int64_t wall_ahead_ns = (int64_t)wall.tv_sec * 1000000000 + wall.tv_nsec - (int64_t)zbmd_now_ns();
    for (uint32_t i = 0; i < beats->count; i++) {
        struct zbmd_beat_peer *peer = &beats->peers[beats->taken[i]];
        if (peer->fd >= 0) zbmd_beats_read_stripe(beats, peer, now_ns, wall_ahead_ns);
        if (peer->way) zbmd_beats_read_way(beats, peer, now_ns);
    }
    beats->read_ns = now_ns;
}

/* One turn of the thread. `starved`: it came later than by a period, so silence may be its own deafness. */
static int zbmd_beats_round(struct zbmd_beats *beats, uint64_t now_ns, int starved, int tick) {
    int tell = 0, beat = tick && beats->on;
    if (beat && now_ns >= beats->lease_until_ns) {
        beats->lapsed = 1;
        beat = 0;
    }
    zbmd_beats_read(beats, now_ns);
    for (uint32_t i = 0; i < beats->count; i++) {
        struct zbmd_beat_peer *peer = &beats->peers[beats->taken[i]];
        if (beat) zbmd_beats_send(beats, peer, now_ns);
        if (zbmd_beats_matter(beats, peer)) tell = 1;
        if (starved || !peer->limit_ns || peer->silent) continue;
        if (now_ns >= peer->last_ns + peer->limit_ns) peer->silent = tell = 1;
    }
    if (!starved) beats->judged_ns = now_ns;
    return tell;
}

static void *zbmd_beats_run(void *argument) {
    struct zbmd_beats *beats = argument;
    uint64_t tick_ns = zbmd_now_ns(), due_ns, now_ns, counter;
    prctl(PR_SET_NAME, "zbmd-beat");
    zbmd_wake_promptly();
    for (;;) {
        pthread_mutex_lock(&beats->lock);
        int stop = beats->stop;
        due_ns = zbmd_beats_due_ns(beats, tick_ns);
        pthread_mutex_unlock(&beats->lock);
        if (stop) return NULL;
        now_ns = zbmd_now_ns();
        /* What was due while it did not run is looked at again at once: that look is not late. */
        if (due_ns < now_ns) due_ns = now_ns;
        uint64_t pause_ns = due_ns - now_ns;
        struct timespec pause = {.tv_sec = (time_t)(pause_ns / 1000000000),
                                 .tv_nsec = (long)(pause_ns % 1000000000)};
        struct pollfd wake = {.fd = beats->wake_fd, .events = POLLIN};
        if (ppoll(&wake, 1, &pause, NULL) > 0 && read(beats->wake_fd, &counter, sizeof counter) < 0 &&
            errno != EAGAIN)
            return NULL;
        pthread_mutex_lock(&beats->lock);
        now_ns = zbmd_now_ns();
        int tick = now_ns >= tick_ns;
        int tell = zbmd_beats_round(beats, now_ns, now_ns > due_ns + beats->period_ns, tick);
        if (tick) {
            /* Not faster after a delay than at twice the pace. */
            tick_ns += beats->period_ns;
            if (tick_ns < now_ns + beats->period_ns / 2) tick_ns = now_ns + beats->period_ns / 2;
        }
        pthread_mutex_unlock(&beats->lock);
        if (tell) {
            counter = 1;
            /* The counter of an eventfd cannot overflow here: Python reads it before 2^64 rounds. */
            ssize_t written = write(beats->tell_fd, &counter, sizeof counter);
            (void)written;
        }
    }
}

/* Returns 0, or an errno. The thread must not keep Python from the lock while it waits for a core itself, nor
 * Python it: hence the inheritance of priority. */
static inline int zbmd_beats_init(struct zbmd_beats *beats, uint64_t period_ns, uint64_t lease_ns) {
    pthread_mutexattr_t attributes;
    beats->wake_fd = beats->tell_fd = -1;
    beats->period_ns = period_ns;
    beats->read_ns = beats->judged_ns = zbmd_now_ns();
    beats->lease_until_ns = beats->read_ns + lease_ns;
    int error = pthread_mutexattr_init(&attributes);
    if (error) return error;
    error = pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT);
    if (!error) error = pthread_mutex_init(&beats->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    if (error) return error;
    beats->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    beats->tell_fd = beats->wake_fd < 0 ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (beats->tell_fd < 0) return errno;
    error = zbmd_start_thread(&beats->thread, zbmd_beats_run, beats);
    beats->running = !error;
    return error;
}

/* End the thread, and give everything back. */
static inline void zbmd_beats_close(struct zbmd_beats *beats) {
    uint64_t one = 1;
    if (beats->running) {
        pthread_mutex_lock(&beats->lock);
        beats->stop = 1;
        pthread_mutex_unlock(&beats->lock);
        ssize_t written = write(beats->wake_fd, &one, sizeof one);
        (void)written;
        pthread_join(beats->thread, NULL);
        beats->running = 0;
    }
    for (uint32_t i = 0; i < beats->count; i++)
        if (beats->peers[beats->taken[i]].fd >= 0) close(beats->peers[beats->taken[i]].fd);
    beats->count = 0;
    if (beats->wake_fd >= 0) close(beats->wake_fd);
    if (beats->tell_fd >= 0) close(beats->tell_fd);
    beats->wake_fd = beats->tell_fd = -1;
}

/* The lowest free place in the table; -1 if all are taken. */
static inline int zbmd_beats_place(struct zbmd_beats *beats) {
    uint64_t taken = 0;
    int found = -1;
    _Static_assert(ZBMD_BEAT_PEERS == 64, "one bit a place");
    pthread_mutex_lock(&beats->lock);
    for (uint32_t i = 0; i < beats->count; i++) taken |= 1ull << beats->taken[i];
    if (~taken) {
        found = __builtin_ctzll(~taken);
        memset(&beats->peers[found], 0, sizeof beats->peers[found]);
        beats->peers[found].fd = -1;
        beats->taken[beats->count++] = (uint8_t)found;
    }
    pthread_mutex_unlock(&beats->lock);
    return found;
}

static inline void zbmd_beats_vacate(struct zbmd_beats *beats, int place) {
    struct zbmd_beat_peer *peer = &beats->peers[place];
    pthread_mutex_lock(&beats->lock);
    if (peer->fd >= 0) close(peer->fd);
    peer->fd = -1;
    peer->way = NULL;
    for (uint32_t i = 0; i < beats->count; i++)
        if (beats->taken[i] == place) beats->taken[i] = beats->taken[--beats->count];
    pthread_mutex_unlock(&beats->lock);
}

/* Give a peer a stripe, in place of the one that it had. */
static inline void zbmd_beats_adopt(struct zbmd_beats *beats, int place, int fd, const uint8_t send_key[16],
                                    const uint8_t receive_key[16], const uint8_t *surplus, size_t nbytes) {
    struct zbmd_beat_peer *peer = &beats->peers[place];
    int on = 1;
    /* Without it arrivals are as late as the thread is; nothing else changes. */
    (void)setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
    pthread_mutex_lock(&beats->lock);
    if (peer->fd >= 0) close(peer->fd);
    memset(&peer->writer, 0, sizeof peer->writer);
    memset(&peer->reader, 0, sizeof peer->reader);
    for (int i = 0; i < 2; i++) {
        peer->writer.key[i] = zbmd_read_le64(send_key + 8 * i);
        peer->reader.key[i] = zbmd_read_le64(receive_key + 8 * i);
    }
    peer->writer.number = peer->reader.number = 1;
    peer->said_known = peer->said_entered = 0;
    peer->fd = fd;
    peer->end = peer->way_end = ZBMD_STRIPE_OPEN;
    peer->way = NULL;
    int end = zbmd_beat_read(&peer->reader, surplus, nbytes);
    if (peer->reader.number != 1) {
        zbmd_beat_arrived(peer, zbmd_now_ns());
        peer->fresh = 1;
    }
    if (end != ZBMD_STRIPE_OPEN) zbmd_stripe_ended(peer, (uint32_t)end, 0);
    pthread_mutex_unlock(&beats->lock);
}

static inline void zbmd_beats_drop_stripe(struct zbmd_beats *beats, int place) {
    struct zbmd_beat_peer *peer = &beats->peers[place];
    pthread_mutex_lock(&beats->lock);
    if (peer->fd >= 0) close(peer->fd);
    peer->fd = -1;
    peer->end = peer->way_end = ZBMD_STRIPE_OPEN;
    peer->way = NULL;
    pthread_mutex_unlock(&beats->lock);
}

/* Read the peer's beats by this way, beside its stripe, from now on; 0 if there is none. It is not ours to free. */
static inline int zbmd_beats_add_way(struct zbmd_beats *beats, int place, struct zbmd_beat_way *way,
                                     const uint64_t send_key[2], const uint64_t receive_key[2]) {
    struct zbmd_beat_peer *peer = &beats->peers[place];
    pthread_mutex_lock(&beats->lock);
    int has_stripe = peer->fd >= 0;
    if (has_stripe) {
        memcpy(peer->way_writer.key, send_key, sizeof peer->way_writer.key);
        memcpy(peer->way_key, receive_key, sizeof peer->way_key);
        peer->way_writer.number = 1;
        peer->way_number = peer->way_sends = peer->way_proven = peer->way_end = peer->way_torn = 0;
        peer->way = way;
    }
    pthread_mutex_unlock(&beats->lock);
    return has_stripe;
}

/* The peer takes our beats by its way. */
static inline void zbmd_beats_use_way(struct zbmd_beats *beats, int place) {
    pthread_mutex_lock(&beats->lock);
    beats->peers[place].way_sends = 1;
    pthread_mutex_unlock(&beats->lock);
}

/* Nothing of the way is touched any more. */
static inline void zbmd_beats_drop_way(struct zbmd_beats *beats, int place) {
    pthread_mutex_lock(&beats->lock);
    beats->peers[place].way = NULL;
    beats->peers[place].way_end = ZBMD_STRIPE_OPEN;
    pthread_mutex_unlock(&beats->lock);
}

/* Wake Python after so long a silence; 0 to observe it no longer. A new peer counts as just heard. */
static inline void zbmd_beats_observe(struct zbmd_beats *beats, int place, uint64_t limit_ns) {
    struct zbmd_beat_peer *peer = &beats->peers[place];
    pthread_mutex_lock(&beats->lock);
    if (!peer->limit_ns && limit_ns) {
        peer->last_ns = zbmd_now_ns();
        peer->taken = peer->arrived;
    }
    peer->limit_ns = limit_ns;
    peer->silent = 0;
    pthread_mutex_unlock(&beats->lock);
}

static inline void zbmd_beats_beat_to(struct zbmd_beats *beats, int place, uint32_t observes_us) {
    pthread_mutex_lock(&beats->lock);
    beats->peers[place].observes_us = observes_us;
    pthread_mutex_unlock(&beats->lock);
}

static inline void zbmd_beats_say(struct zbmd_beats *beats, uint32_t on, uint64_t known, uint64_t entered) {
    pthread_mutex_lock(&beats->lock);
    beats->on = on;
    beats->known = known;
    beats->entered = entered;
    pthread_mutex_unlock(&beats->lock);
}

static inline void zbmd_beats_set_period(struct zbmd_beats *beats, uint64_t period_ns) {
    pthread_mutex_lock(&beats->lock);
    beats->period_ns = period_ns;
    pthread_mutex_unlock(&beats->lock);
}

static inline void zbmd_beats_attend(struct zbmd_beats *beats, uint32_t attentive) {
    pthread_mutex_lock(&beats->lock);
    beats->attentive = attentive;
    pthread_mutex_unlock(&beats->lock);
}

/* Something else was sent to a peer, or came from it; returns whether Python was woken for its silence. */
static inline void zbmd_beats_sent(struct zbmd_beats *beats, int place) {
    pthread_mutex_lock(&beats->lock);
    beats->peers[place].sent_ns = zbmd_now_ns();
    pthread_mutex_unlock(&beats->lock);
}

static inline int zbmd_beats_heard(struct zbmd_beats *beats, int place) {
    struct zbmd_beat_peer *peer = &beats->peers[place];
    pthread_mutex_lock(&beats->lock);
    zbmd_beat_arrived(peer, zbmd_now_ns());
    int silent = (int)peer->silent;
    pthread_mutex_unlock(&beats->lock);
    return silent;
}

/* Python's thread lives: beat for `lease_ns` more. Returns whether beats were withheld meanwhile. */
static inline int zbmd_beats_renew(struct zbmd_beats *beats, uint64_t lease_ns) {
    pthread_mutex_lock(&beats->lock);
    int lapsed = (int)beats->lapsed;
    beats->lapsed = 0;
    beats->lease_until_ns = zbmd_now_ns() + lease_ns;
    pthread_mutex_unlock(&beats->lock);
    return lapsed;
}

/* Read all stripes now, whatever the thread does. */
static inline void zbmd_beats_read_now(struct zbmd_beats *beats) {
    pthread_mutex_lock(&beats->lock);
    zbmd_beats_read(beats, zbmd_now_ns());
    pthread_mutex_unlock(&beats->lock);
}

static inline uint64_t zbmd_beats_judged_ns(struct zbmd_beats *beats) {
    pthread_mutex_lock(&beats->lock);
    uint64_t judged_ns = beats->judged_ns;
    pthread_mutex_unlock(&beats->lock);
    return judged_ns;
}

/* What is new of a peer; returns whether anything is. */
static inline int zbmd_beats_take(struct zbmd_beats *beats, int place, struct zbmd_beat_news *news) {
    struct zbmd_beat_peer *peer = &beats->peers[place];
    pthread_mutex_lock(&beats->lock);
    uint32_t count = peer->arrived - peer->taken;
    if (count > ZBMD_BEAT_ARRIVALS) count = ZBMD_BEAT_ARRIVALS;
    for (uint32_t i = 0; i < count; i++)
        news->arrivals[i] = peer->arrivals[(peer->arrived - count + i) % ZBMD_BEAT_ARRIVALS];
    news->count = count;
    news->fresh = peer->fresh;
    news->end = peer->end;
    news->way_end = peer->way_end;
    news->error = peer->error;
    news->known = peer->reader.known;
    news->entered = peer->reader.entered;
    peer->taken = peer->arrived;
    peer->fresh = 0;
    peer->end = peer->way_end = ZBMD_STRIPE_OPEN;
    pthread_mutex_unlock(&beats->lock);
    return count || news->fresh || news->end || news->way_end;
}

#endif
