/* A page that is made anew each time it is asked for: a visitor's basket, kept in a file, as a table. */
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    const char *query = getenv("QUERY_STRING");
    unsigned visitor = query ? (unsigned)atoi(query) % 1000 : 0, items[64] = {0};
    char path[64];
    snprintf(path, sizeof path, "/tmp/basket%u", visitor);
    FILE *file = fopen(path, "rb");
    if (file) {
        if (fread(items, sizeof items, 1, file) != 1) items[0] = 0;
        fclose(file);
    }
    items[visitor % 64]++;
    file = fopen(path, "wb");
    if (file) {
        fwrite(items, sizeof items, 1, file);
        fclose(file);
    }
    printf("Content-Type: text/html\r\n\r\n<html><body><h1>Visitor %u</h1><table>\n", visitor);
    for (int i = 0; i < 64; i++) printf("<tr><td>item %d</td><td>%u</td></tr>\n", i, items[i]);
    printf("</table></body></html>\n");
    return 0;
}
