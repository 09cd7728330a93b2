/* Inside a guest what `documents.rs` and `io.rs` do on a mount, smaller: `work documents RUNS`, `work seismic MIB`. Says on standard
 * output when a part is done. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INPUTS = 120, PASSES = 20, PIECE = 256 << 10, MODEL = 8 << 20 };

static void must(int good, const char *what) {
    if (good) return;
    perror(what);
    exit(1);
}

static void think(unsigned char *bytes, size_t len, int passes) {
    for (int pass = 0; pass < passes; pass++) {
        unsigned char state = (unsigned char)pass;
        for (size_t at = 0; at < len; at++) bytes[at] = state = (unsigned char)(state * 31 + bytes[at]);
    }
}

static size_t take(const char *path, unsigned char *to, size_t room) {
    FILE *file = fopen(path, "r");
    must(file != NULL, path);
    size_t len = fread(to, 1, room, file);
    fclose(file);
    return len;
}

static void put(const char *path, const unsigned char *from, size_t len) {
    FILE *file = fopen(path, "w");
    must(file && fwrite(from, 1, len, file) == len && fclose(file) == 0, path);
}

static void did(const char *what, int number) {
    printf("DID %s %d\n", what, number);
    fflush(stdout);
}

static void documents(int runs) {
    static const char *small[] = {"main.aux", "main.toc", "main.log", "main.out"};
    static unsigned char whole[MODEL];
    char path[32];
    for (int run = 0; run < runs; run++) {
        size_t len = 0;
        for (int input = 0; input < INPUTS; input++) {
            snprintf(path, sizeof path, "in/%03d.tex", input);
            len += take(path, whole + len, sizeof whole - len);
        }
        for (int name = 0; name < 4; name++) put(small[name], whole, 40000 + run * 100);
        think(whole, len, PASSES);
        put("main.dvi.tmp", whole, len);
        must(rename("main.dvi.tmp", "main.dvi") == 0, "rename");
        did("document", run);
    }
}

static void seismic(int mib) {
    static unsigned char model[MODEL], piece[PIECE];
    must(take("model", model, MODEL) == MODEL, "model");
    int pieces = mib * 4, trace = open("trace", O_RDWR | O_CREAT | O_TRUNC, 0644);
    must(trace >= 0, "trace");
    for (int number = 0; number < pieces; number++) {
        memcpy(piece, model + (long)number * 7919 % (MODEL - PIECE), PIECE);
        think(piece, PIECE, 4);
        must(write(trace, piece, PIECE) == PIECE, "trace");
    }
    must(fsync(trace) == 0, "trace");
    did("phase", 1);
    static const int passes[] = {8, 16, 60};
    for (int phase = 0; phase < 3; phase++, pieces /= 2) {
        char path[32];
        snprintf(path, sizeof path, "stack-%d", phase);
        int out = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
        must(out >= 0, path);
        for (int number = 0; number < pieces; number++) {
            must(pread(trace, piece, PIECE, (off_t)(number * 13 % pieces) * PIECE) == PIECE, "trace");
            think(piece, PIECE, passes[phase]);
            must(write(out, piece, PIECE / 4) == PIECE / 4, path);
        }
        must(fsync(out) == 0 && close(out) == 0, path);
        did("phase", phase + 2);
    }
}

int main(int count, char **words) {
    int number = count == 3 ? atoi(words[2]) : 0;
    if (number > 0 && !strcmp(words[1], "documents")) return documents(number), 0;
    if (number > 0 && !strcmp(words[1], "seismic")) return seismic(number), 0;
    return 2;
}
