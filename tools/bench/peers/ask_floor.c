/* The floor of a small ask: what this machine does to a round trip through shared memory that nobody parks for.
 *
 * Two processes spin on a word each. Before it answers, each is busy for HOLD_NS, as an ask's two sides are with
 * their own work: what interrupts a processor hits a round trip by how long that takes.
 *
 *   cc -O2 -I TRANSPORT ask_floor.c -o ask_floor && ./ask_floor SECONDS HOLD_NS
 *
 * Prints the median and the 99th percentile, in us.
 */
#include "transport/native/segment.h" /* first: it asks for GNU extensions */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define SAMPLES_MAX (1 << 22)
#define ANSWER_OFFSET 256 /* in lines of their own, also for a processor that fetches them by pairs */

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void hold(uint64_t hold_ns) {
    for (uint64_t until_ns = zbmd_now_ns() + hold_ns; zbmd_now_ns() < until_ns;) {}
}

static void wait_for(zbmd_base word, uint64_t value) {
    while (zbmd_load64(word, 0) != value) zbmd_pause();
}

static void answer(zbmd_base asked, zbmd_base answered, uint64_t hold_ns, pid_t asker) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != asker) exit(1);
    for (uint64_t n = 1;; n++) {
        wait_for(asked, n);
        hold(hold_ns);
        zbmd_store64(answered, 0, n);
    }
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    double seconds = argc == 3 ? atof(argv[1]) : 0;
    double *times_us = malloc(SAMPLES_MAX * sizeof *times_us);
    zbmd_base words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (seconds <= 0 || atol(argv[2]) < 0 || times_us == NULL || words == MAP_FAILED) die("ask_floor");
    uint64_t hold_ns = (uint64_t)atol(argv[2]);
    pid_t asker = getpid(), answerer = fork();
    if (answerer < 0) die("fork");
    if (answerer == 0) answer(words, words + ANSWER_OFFSET, hold_ns, asker);
    uint64_t before_ns = zbmd_now_ns(), end_ns = before_ns + (uint64_t)(seconds * 1e9);
    size_t count = 0;
    while (before_ns < end_ns && count < SAMPLES_MAX) {
        hold(hold_ns);
        zbmd_store64(words, 0, count + 1);
        wait_for(words + ANSWER_OFFSET, count + 1);
        uint64_t now_ns = zbmd_now_ns();
        times_us[count++] = (double)(now_ns - before_ns) / 1e3;
        before_ns = now_ns;
    }
    kill(answerer, SIGKILL);
    waitpid(answerer, NULL, 0);
    qsort(times_us, count, sizeof *times_us, by_size);
    printf("%.3f %.3f\n", times_us[count / 2], times_us[count * 99 / 100]);
    return 0;
}
