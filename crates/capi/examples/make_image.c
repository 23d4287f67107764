/*
 * Makes an image file with a copy of a folder: make_image IMAGE FOLDER
 *
 * The copy keeps names, contents, symbolic links, permissions, owners and times.
 */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <ubtrfs.h>
#include <unistd.h>

/* Ends the program if a call failed. */
static void check(int status, ubtrfs_error *error) {
  if (status != 0) {
    fprintf(stderr, "make_image: %s\n", ubtrfs_error_message(error));
    exit(1);
  }
}

/* Ends the program if a call of the system failed. */
static void check_host(int result, const char *path) {
  if (result < 0) {
    fprintf(stderr, "make_image: %s: %s\n", path, strerror(errno));
    exit(1);
  }
}

static char *join(const char *folder, const char *name) {
  char *path = (char *)malloc(strlen(folder) + strlen(name) + 2);
  if (path == NULL) abort();
  sprintf(path, "%s/%s", folder, name);
  return path;
}

static void copy_file(ubtrfs_fs *fs, const char *from, const char *to) {
  ubtrfs_error *error;
  ubtrfs_file *file;
  static char buffer[1 << 18];
  int fd = open(from, O_RDONLY);
  check_host(fd, from);
  check(ubtrfs_file_open(fs, to, UBTRFS_WRITE | UBTRFS_EXCLUSIVE, UBTRFS_DEFAULT_MODE, &file, &error), error);
  for (;;) {
    ssize_t len = read(fd, buffer, sizeof buffer);
    check_host((int)len, from);
    if (len == 0) break;
    check(ubtrfs_file_write(file, buffer, (size_t)len, &error), error);
  }
  check(ubtrfs_file_close(file, &error), error);
  close(fd);
}

static void copy(ubtrfs_fs *fs, const char *from, const char *to) {
  ubtrfs_error *error;
  ubtrfs_times times = UBTRFS_TIMES_INIT;
  struct stat st;
  check_host(lstat(from, &st), from);
  if (S_ISDIR(st.st_mode)) {
    struct dirent *entry;
    DIR *dir = opendir(from);
    check_host(dir == NULL ? -1 : 0, from);
    check(ubtrfs_mkdir_all(fs, to, &error), error);
    while ((entry = readdir(dir)) != NULL) {
      if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
        char *child = join(from, entry->d_name), *copied = join(to, entry->d_name);
        copy(fs, child, copied);
        free(child);
        free(copied);
      }
    }
    closedir(dir);
  } else if (S_ISLNK(st.st_mode)) {
    char target[4096];
    ssize_t len = readlink(from, target, sizeof target - 1);
    check_host((int)len, from);
    target[len] = 0;
    check(ubtrfs_symlink(fs, target, to, &error), error);
  } else if (S_ISREG(st.st_mode)) {
    copy_file(fs, from, to);
  } else {
    fprintf(stderr, "make_image: %s is left out: no file, directory or symbolic link\n", from);
    return;
  }
  check(ubtrfs_chown(fs, to, st.st_uid, st.st_gid, UBTRFS_NOFOLLOW, &error), error);
  if (!S_ISLNK(st.st_mode)) check(ubtrfs_chmod(fs, to, st.st_mode & 07777, &error), error);
  times.modified.seconds = st.st_mtim.tv_sec;
  times.modified.nanoseconds = (uint32_t)st.st_mtim.tv_nsec;
  times.modified.is_set = 1;
  check(ubtrfs_utimes(fs, to, &times, UBTRFS_NOFOLLOW, &error), error);
}

int main(int argc, char **argv) {
  ubtrfs_error *error;
  ubtrfs_fs *fs;
  ubtrfs_mkfs_options options = UBTRFS_MKFS_OPTIONS_INIT;
  ubtrfs_open_options mount = UBTRFS_OPEN_OPTIONS_INIT;
  if (argc != 3) {
    fprintf(stderr, "usage: make_image IMAGE FOLDER\n");
    return 2;
  }
  options.label = "made in C";
  mount.mount_options = "compress=zstd";
  check(ubtrfs_make(argv[1], UINT64_C(1) << 30, &options, &mount, &fs, &error), error);
  copy(fs, argv[2], "/");
  check(ubtrfs_close(fs, &error), error);
  return 0;
}
