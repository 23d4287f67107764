/*
 * Copies files out of a damaged image: rescue IMAGE FOLDER
 *
 * Everything that can be read is copied. A block that is damaged in all copies costs only what lies in it: of a file, the
 * bytes that cannot be read stay a hole. The last line tells how much is missing, and the exit status is 1 then.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <ubtrfs.h>
#include <unistd.h>

static unsigned long nr_files, nr_damaged;

/* Tells what is damaged, and frees the error. */
static void tell(const char *path, ubtrfs_error *error) {
  fprintf(stderr, "rescue: %s: %s\n", path, ubtrfs_error_message(error));
  ubtrfs_error_free(error);
  nr_damaged++;
}

static void fail_host(const char *path) {
  fprintf(stderr, "rescue: %s: %s\n", path, strerror(errno));
  exit(2);
}

static char *join(const char *folder, const char *name) {
  char *path = (char *)malloc(strlen(folder) + strlen(name) + 2);
  if (path == NULL) abort();
  sprintf(path, "%s/%s", folder, name);
  return path;
}

static void rescue_file(ubtrfs_fs *fs, const char *from, const char *to) {
  enum { STEP = 4096 };
  ubtrfs_metadata st;
  ubtrfs_error *error;
  ubtrfs_file *file;
  char buffer[STEP];
  uint64_t offset;
  int is_damaged = 0, fd;
  if (ubtrfs_file_open(fs, from, UBTRFS_READ, 0, &file, &error) != 0) {
    tell(from, error);
    return;
  }
  fd = open(to, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
  if (fd < 0) fail_host(to);
  if (ubtrfs_file_stat(file, &st, &error) != 0) {
    tell(from, error);
    st.size = 0;
  }
  if (ftruncate(fd, (off_t)st.size) != 0) fail_host(to);
  for (offset = 0; offset < st.size; offset += STEP) {
    size_t len;
    if (ubtrfs_file_pread(file, buffer, STEP, offset, &len, &error) != 0) {
      if (!is_damaged) tell(from, error);
      else ubtrfs_error_free(error);
      is_damaged = 1;
    } else if (pwrite(fd, buffer, len, (off_t)offset) != (ssize_t)len) {
      fail_host(to);
    }
  }
  if (fchmod(fd, st.mode & 0777) != 0 || close(fd) != 0) fail_host(to);
  ubtrfs_file_close(file, NULL);
  nr_files++;
}

static void rescue_dir(ubtrfs_fs *fs, const char *from, const char *to) {
  const ubtrfs_dir_entry *entry;
  ubtrfs_error *error;
  ubtrfs_dir *dir;
  if (mkdir(to, 0700) != 0) fail_host(to);
  if (ubtrfs_dir_open(fs, from, &dir, &error) != 0) {
    tell(from, error);
    return;
  }
  for (;;) {
    char *child, *copy, *target;
    if (ubtrfs_dir_next(dir, &entry, &error) != 0) {
      tell(from, error);
      break;
    }
    if (entry == NULL) break;
    /* Names in an image are not trusted. They have no '/', and ".." is no name of an entry; look all the same. */
    if (strchr(entry->name, '/') != NULL || strcmp(entry->name, "..") == 0) continue;
    child = join(from, entry->name);
    copy = join(to, entry->name);
    if (entry->kind == UBTRFS_KIND_DIRECTORY) {
      rescue_dir(fs, child, copy);
    } else if (entry->kind == UBTRFS_KIND_FILE) {
      rescue_file(fs, child, copy);
    } else if (entry->kind == UBTRFS_KIND_SYMLINK) {
      if (ubtrfs_readlink(fs, child, &target, &error) != 0) {
        tell(child, error);
      } else {
        if (symlink(target, copy) != 0) fail_host(copy);
        ubtrfs_free(target);
      }
    }
    free(child);
    free(copy);
  }
  ubtrfs_dir_close(dir, NULL);
}

int main(int argc, char **argv) {
  /* Read-only, without what is damaged: older roots, trees that are not needed for reading, no replay of the log. */
  static const char *const tries[] = {"", "rescue=all", "rescue=all,rescue=usebackuproot"};
  ubtrfs_open_options options = UBTRFS_OPEN_OPTIONS_INIT;
  ubtrfs_error *error = NULL;
  ubtrfs_fs *fs = NULL;
  size_t i;
  if (argc != 3) {
    fprintf(stderr, "usage: rescue IMAGE FOLDER\n");
    return 2;
  }
  options.flags = UBTRFS_OPEN_READ_ONLY;
  for (i = 0; i < sizeof tries / sizeof *tries; i++) {
    ubtrfs_error_free(error);
    options.mount_options = tries[i];
    if (ubtrfs_open(argv[1], &options, &fs, &error) == 0) break;
  }
  if (fs == NULL) {
    fprintf(stderr, "rescue: %s\n", ubtrfs_error_message(error));
    return 2;
  }
  rescue_dir(fs, "/", argv[2]);
  ubtrfs_close(fs, NULL);
  printf("%lu files, %lu damaged\n", nr_files, nr_damaged);
  return nr_damaged == 0 ? 0 : 1;
}
