/*
 * Backs a subvolume up into a directory, incrementally: backup IMAGE SUBVOLUME DIRECTORY
 *
 * Each run makes a read-only snapshot SUBVOLUME.N and writes it to DIRECTORY/N.stream: the first one whole, later ones as
 * the difference to the snapshot before. `btrfs receive`, `ubtrfs receive` or restore bring them back in their order:
 *
 * backup --restore IMAGE DIRECTORY     receives all streams into the root of another image
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <ubtrfs.h>
#include <unistd.h>

static void check(int status, ubtrfs_error *error) {
  if (status != 0) {
    fprintf(stderr, "backup: %s\n", ubtrfs_error_message(error));
    exit(1);
  }
}

static void fail(const char *path) {
  fprintf(stderr, "backup: %s: %s\n", path, strerror(errno));
  exit(1);
}

/* A name that is made of others. */
static char *name(const char *begin, const char *middle, int number, const char *end) {
  const size_t len = strlen(begin) + strlen(middle) + strlen(end) + 12;
  char *made = (char *)malloc(len);
  if (made == NULL) abort();
  if (number > 0) snprintf(made, len, "%s%s%d%s", begin, middle, number, end);
  else snprintf(made, len, "%s%s%s", begin, middle, end);
  return made;
}

/* Prints the progress of a job about once a second, until the job is cancelled. */
static void *show_progress(void *job) {
  ubtrfs_progress progress;
  time_t printed = time(NULL);
  while (ubtrfs_job_wait((ubtrfs_job *)job, 1000, &progress, NULL) == 0 && !progress.is_cancelled) {
    if (time(NULL) == printed) continue;
    fprintf(stderr, "%llu bytes\n", (unsigned long long)progress.done);
    printed = time(NULL);
  }
  return NULL;
}

static void send_snapshot(ubtrfs_fs *fs, const char *snapshot, const char *parent, const char *stream) {
  ubtrfs_send_options options = UBTRFS_SEND_OPTIONS_INIT;
  ubtrfs_error *error;
  ubtrfs_job *job;
  pthread_t thread;
  int fd;
  /* A stream that is not complete has another name, so an interrupted run leaves none that looks complete. */
  char *part = name(stream, ".part", 0, "");
  fd = open(part, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd < 0) fail(part);
  check(ubtrfs_job_new(&job, &error), error);
  if (pthread_create(&thread, NULL, show_progress, job) != 0) fail("thread");
  options.version = 2;
  options.flags = UBTRFS_SEND_COMPRESSED_DATA;
  options.parent = parent;
  check(ubtrfs_send_fd(fs, snapshot, &options, fd, job, &error), error);
  /* The send is complete. This only wakes the other thread. */
  ubtrfs_job_cancel(job);
  pthread_join(thread, NULL);
  check(ubtrfs_job_close(job, &error), error);
  if (fsync(fd) != 0 || close(fd) != 0 || rename(part, stream) != 0) fail(stream);
  free(part);
}

static int backup(const char *image, const char *subvolume, const char *directory) {
  char *snapshot, *parent, *stream = NULL;
  ubtrfs_error *error;
  ubtrfs_fs *fs;
  struct stat st;
  int number = 0;
  check(ubtrfs_open(image, NULL, &fs, &error), error);
  do {
    free(stream);
    stream = name(directory, "/", ++number, ".stream");
  } while (stat(stream, &st) == 0);
  parent = name(subvolume, ".", number - 1, "");
  snapshot = name(subvolume, ".", number, "");
  check(ubtrfs_snapshot(fs, subvolume, snapshot, UBTRFS_SNAPSHOT_READ_ONLY, &error), error);
  send_snapshot(fs, snapshot, number > 1 ? parent : NULL, stream);
  /* The difference to this snapshot is next, so the one before is not needed. */
  if (number > 1) check(ubtrfs_subvolume_delete(fs, parent, &error), error);
  check(ubtrfs_close(fs, &error), error);
  printf("%s\n", stream);
  free(snapshot);
  free(parent);
  free(stream);
  return 0;
}

static int restore(const char *image, const char *directory) {
  char *stream;
  ubtrfs_error *error;
  ubtrfs_fs *fs;
  int number, fd;
  check(ubtrfs_open(image, NULL, &fs, &error), error);
  for (number = 1;; number++) {
    ubtrfs_receive_report report;
    stream = name(directory, "/", number, ".stream");
    fd = open(stream, O_RDONLY);
    if (fd < 0 && errno == ENOENT && number > 1) break;
    if (fd < 0) fail(stream);
    check(ubtrfs_receive_fd(fs, "/", UBTRFS_RECEIVE_VERIFY, fd, NULL, &report, &error), error);
    close(fd);
    printf("%s: %llu bytes\n", stream, (unsigned long long)report.nr_bytes);
    free(stream);
  }
  free(stream);
  check(ubtrfs_close(fs, &error), error);
  return 0;
}

int main(int argc, char **argv) {
  if (argc == 4 && strcmp(argv[1], "--restore") == 0) return restore(argv[2], argv[3]);
  if (argc == 4) return backup(argv[1], argv[2], argv[3]);
  fprintf(stderr, "usage: backup IMAGE SUBVOLUME DIRECTORY\n       backup --restore IMAGE DIRECTORY\n");
  return 2;
}
