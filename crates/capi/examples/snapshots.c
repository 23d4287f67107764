/*
 * A browser of snapshots:
 *   snapshots IMAGE                   lists subvolumes and snapshots, with their sources
 *   snapshots IMAGE PATH              lists the states of a file in all snapshots of its subvolume
 *   snapshots IMAGE PATH SNAPSHOT     prints the file as it is in a snapshot
 *
 * PATH is SUBVOLUME/FILE, such as home/notes.txt.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ubtrfs.h>

static void check(int status, ubtrfs_error *error) {
  if (status != 0) {
    fprintf(stderr, "snapshots: %s\n", ubtrfs_error_message(error));
    exit(1);
  }
}

static void print_time(ubtrfs_time when) {
  char text[32] = "?";
  time_t seconds = (time_t)when.seconds;
  if (when.is_set) strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", gmtime(&seconds));
  printf("%s", text);
}

static int is_same_uuid(const uint8_t *a, const uint8_t *b) {
  static const uint8_t none[16] = {0};
  return memcmp(a, b, 16) == 0 && memcmp(a, none, 16) != 0;
}

static void list(const ubtrfs_subvolume *subvolumes, size_t nr) {
  size_t i, source;
  for (i = 0; i < nr; i++) {
    print_time(subvolumes[i].created);
    printf("  %s  /%s", subvolumes[i].is_read_only ? "read-only " : "read-write", subvolumes[i].path);
    for (source = 0; source < nr; source++) {
      if (is_same_uuid(subvolumes[i].parent_uuid, subvolumes[source].uuid)) printf("  of /%s", subvolumes[source].path);
    }
    putchar('\n');
  }
}

/* The path of a file in another subvolume. */
static char *path_in(const char *subvolume, const char *file) {
  char *path = (char *)malloc(strlen(subvolume) + strlen(file) + 3);
  if (path == NULL) abort();
  sprintf(path, "/%s/%s", subvolume, file);
  return path;
}

/* Splits PATH into its subvolume, which is returned, and the file in it. */
static const ubtrfs_subvolume *subvolume_of(const ubtrfs_subvolume *list, size_t nr, const char *path, const char **file) {
  const ubtrfs_subvolume *found = NULL;
  size_t i, longest = 0;
  for (i = 0; i < nr; i++) {
    size_t len = strlen(list[i].path);
    if (len > longest && strncmp(path, list[i].path, len) == 0 && path[len] == '/') {
      found = &list[i];
      longest = len;
    }
  }
  *file = path + longest + 1;
  return found;
}

int main(int argc, char **argv) {
  ubtrfs_open_options options = UBTRFS_OPEN_OPTIONS_INIT;
  ubtrfs_subvolume *subvolumes;
  const ubtrfs_subvolume *origin;
  const char *wanted, *file;
  ubtrfs_error *error;
  ubtrfs_fs *fs;
  size_t nr, i;
  if (argc < 2 || argc > 4) {
    fprintf(stderr, "usage: snapshots IMAGE [SUBVOLUME/FILE [SNAPSHOT]]\n");
    return 2;
  }
  options.flags = UBTRFS_OPEN_READ_ONLY;
  options.mount_options = "subvolid=5"; /* The top level, from which the paths of subvolumes start. */
  check(ubtrfs_open(argv[1], &options, &fs, &error), error);
  check(ubtrfs_subvolume_list(fs, &subvolumes, &nr, &error), error);
  if (argc == 2) {
    list(subvolumes, nr);
  } else {
    wanted = argv[2][0] == '/' ? argv[2] + 1 : argv[2];
    origin = subvolume_of(subvolumes, nr, wanted, &file);
    if (origin == NULL) {
      fprintf(stderr, "snapshots: %s is in no subvolume\n", argv[2]);
      return 1;
    }
    for (i = 0; i < nr; i++) {
      char *path = path_in(subvolumes[i].path, file);
      ubtrfs_metadata st;
      int exists = 0;
      if (&subvolumes[i] != origin && !is_same_uuid(subvolumes[i].parent_uuid, origin->uuid)) {
        free(path);
        continue;
      }
      check(ubtrfs_exists(fs, path, &exists, &error), error);
      if (argc == 3 && exists) {
        check(ubtrfs_stat(fs, path, &st, &error), error);
        print_time(st.modified);
        printf("  %10llu bytes  /%s\n", (unsigned long long)st.size, subvolumes[i].path);
      } else if (argc == 4 && strcmp(subvolumes[i].path, argv[3][0] == '/' ? argv[3] + 1 : argv[3]) == 0) {
        void *data;
        size_t len;
        check(ubtrfs_read_file(fs, path, &data, &len, &error), error);
        fwrite(data, 1, len, stdout);
        ubtrfs_free(data);
      }
      free(path);
    }
  }
  ubtrfs_free(subvolumes);
  check(ubtrfs_close(fs, &error), error);
  return 0;
}
