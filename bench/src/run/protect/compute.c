/* Work with the access patterns of two of the NAS parallel benchmarks, since no package has them.
 *
 * `compute ep FILE`: pairs of pseudo-random numbers, those in the unit circle made into Gaussian deviates and counted by
 * annulus. All processor, a page or two of memory.
 * `compute is FILE`: two million small integers, some changed in each round, ranked by counting. Writes all over 16 MiB.
 * FILE says how many rounds are done. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void show(const char *path, unsigned long rounds) {
    FILE *file = fopen(path, "r+");
    if (!file) exit(1);
    fprintf(file, "%lu\n", rounds);
    fclose(file);
}

static uint64_t seed = 271828183;
static double next(void) {
    seed = seed * 1220703125u & ((1ull << 46) - 1);
    return (double)seed / (double)(1ull << 46);
}

static void ep(const char *path) {
    static unsigned long annuli[10];
    for (unsigned long round = 1;; round++) {
        for (int pair = 0; pair < 1 << 14; pair++) {
            double x = 2 * next() - 1, y = 2 * next() - 1, t = x * x + y * y;
            if (t > 1 || t == 0) continue;
            double factor = sqrt(-2 * log(t) / t), a = fabs(x * factor), b = fabs(y * factor);
            annuli[(int)(a > b ? a : b) % 10]++;
        }
        show(path, round);
    }
}

#define KEYS (1 << 21)
#define KINDS (1 << 16)
static void is(const char *path) {
    static uint32_t keys[KEYS], rank[KEYS], count[KINDS];
    for (size_t i = 0; i < KEYS; i++) keys[i] = (uint32_t)(next() * KINDS);
    for (unsigned long round = 1;; round++) {
        for (size_t i = 0; i < 1024; i++) keys[(size_t)(next() * KEYS)] = (uint32_t)(next() * KINDS);
        memset(count, 0, sizeof count);
        for (size_t i = 0; i < KEYS; i++) count[keys[i]]++;
        for (size_t i = 1; i < KINDS; i++) count[i] += count[i - 1];
        for (size_t i = KEYS; i-- > 0;) rank[--count[keys[i]]] = (uint32_t)i;
        show(path, round);
    }
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "ep")) ep(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "is")) is(argv[2]);
    return 2;
}
