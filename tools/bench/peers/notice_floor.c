/* The floor of a death notice: how soon this kernel reports a SIGKILL, to bare native threads.
 *
 * Each trial forks a victim that touches NBYTES of memory, holds a robust mutex (pthreads over the kernel's
 * robust list) in shared memory and one end of a socket pair. Three threads wait, for the mutex, for the
 * victim's pidfd and for the socket's end, with the priority that our own watchers ask for (life.h).
 *
 *   cc -O2 -I TRANSPORT notice_floor.c -o notice_floor -pthread && ./notice_floor CONTROL
 */
#include "transport/native/life.h" /* first: it asks for GNU extensions */

#include "control.h"
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define SETTLE_US 20000 /* until the three threads sleep in the kernel */

struct trial {
    pthread_mutex_t *mutex;
    int pidfd, socket;
    double mutex_ns, pidfd_ns, socket_ns;
};

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void *wait_for_mutex(void *argument) {
    struct trial *trial = argument;
    zbmd_wake_promptly();
    int error = pthread_mutex_lock(trial->mutex);
    trial->mutex_ns = (double)zbmd_now_ns();
    if (error != EOWNERDEAD) exit(1);
    return NULL;
}

static void *wait_for_pidfd(void *argument) {
    struct trial *trial = argument;
    struct pollfd wanted = {.fd = trial->pidfd, .events = POLLIN};
    zbmd_wake_promptly();
    while (poll(&wanted, 1, -1) != 1) {}
    trial->pidfd_ns = (double)zbmd_now_ns();
    return NULL;
}

static void *wait_for_end(void *argument) {
    struct trial *trial = argument;
    char byte;
    zbmd_wake_promptly();
    while (read(trial->socket, &byte, 1) != 0) {}
    trial->socket_ns = (double)zbmd_now_ns();
    return NULL;
}

static void be_the_victim(pthread_mutex_t *mutex, long nbytes, int ready) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char *memory = malloc((size_t)nbytes + 1);
    if (memory == NULL) exit(1);
    memset(memory, 1, (size_t)nbytes + 1);
    if (pthread_mutex_lock(mutex) != 0 || write(ready, memory, 1) != 1) exit(1);
    for (;;) pause();
}

static void run(pthread_mutex_t *mutex, long nbytes, double *ns) {
    int pair[2], ready[2];
    char byte;
    pthread_t threads[3];
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &attributes);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0 || pipe(ready) != 0) die("socketpair");
    pid_t victim = fork();
    if (victim < 0) die("fork");
    if (victim == 0) be_the_victim(mutex, nbytes, ready[1]);
    close(pair[1]);
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1) die("the victim was not ready");
    struct trial trial = {.mutex = mutex, .socket = pair[0]};
    trial.pidfd = (int)syscall(SYS_pidfd_open, victim, 0);
    if (trial.pidfd < 0) die("pidfd_open");
    void *(*waits[])(void *) = {wait_for_mutex, wait_for_pidfd, wait_for_end};
    for (int i = 0; i < 3; i++)
        if (zbmd_start_thread(&threads[i], waits[i], &trial) != 0) die("pthread_create");
    usleep(SETTLE_US);
    double killed_ns = (double)zbmd_now_ns();
    kill(victim, SIGKILL);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    waitpid(victim, NULL, 0);
    ns[0] = trial.mutex_ns - killed_ns;
    ns[1] = trial.pidfd_ns - killed_ns;
    ns[2] = trial.socket_ns - killed_ns;
    close(trial.pidfd);
    close(pair[0]);
    close(ready[0]);
}

int main(int argc, char **argv) {
    struct control control;
    char what[32];
    long nbytes, trials;
    double ns[3];
    pthread_mutex_t *mutex =
        mmap(NULL, sizeof *mutex, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (mutex == MAP_FAILED) die("mmap");
    if (argc != 2 || control_open(&control, argv[1], 0) != 0) die("notice_floor: no benchmark here");
    while (control_next(&control, what, &nbytes, &trials)) {
        run(mutex, nbytes, ns);
        control_reply(&control, ns, 3);
    }
    return 0;
}
