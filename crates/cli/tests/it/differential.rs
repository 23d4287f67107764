//! Makes random system calls as several users, on our mount and on Linux's btrfs. Results and attributes must be equal.
//! The trees must be equal too, also after remounts and when each side mounts the other side's image. At the end,
//! `btrfs check` must be clean.
//!
//! Method: runs `testkit::differential` for about a minute. For runs of hours, use the example `differential` of
//! testkit. `UBTRFS_SEED=N` starts with another seed. Without root, FUSE or the kernel's btrfs, the test says that it
//! skips; with CI=true it fails.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use ubtrfs_testkit::differential::{ALLOWED, KNOWN, Options, Setup, Source, run, run_rounds};
use ubtrfs_testkit::{Rng, capability};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

fn options(time: Duration) -> Options {
    Options {
        setups: vec![Setup::new(Path::new(UBTRFS))],
        seed: Rng::seed_or(1),
        steps: 600,
        time,
        stop_at_first: true,
        // The limit on rounds keeps a fast machine from running random sequences that no earlier run has tried, so CI
        // does not find new failing cases by chance. The example `differential` searches for such cases.
        rounds: 24,
        shrink_time: Duration::from_secs(120),
    }
}

#[test]
fn random_calls_are_answered_as_linux_answers_them() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    match run_rounds(&options(Duration::from_secs(60))) {
        Ok(summary) => println!("{summary}"),
        Err(failure) => panic!("{failure}"),
    }
}

/// Runs steps, each one line of JSON, which must have equal results on both sides.
fn agree(steps: &[&str]) {
    agree_but(steps, &[]);
}

/// Works like [`agree`], but accepts differences that have these names.
fn agree_but(steps: &[&str], allowed: &[&str]) {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let steps = steps.iter().map(|step| serde_json::from_str(step).unwrap()).collect();
    let outcome = run(&Setup::new(Path::new(UBTRFS)), Source::Steps(steps)).unwrap();
    assert!(outcome.failure.is_none(), "{}", outcome.failure.unwrap().text);
    assert!(outcome.allowed.keys().all(|name| allowed.contains(name)), "{:?}", outcome.allowed);
}

#[test]
fn chown_to_nobody_changes_ctime_and_drops_set_id_bits() {
    agree(&[
        r#"{"user":0,"call":{"Mknod":{"path":"f","kind":"File","mode":3565,"major":0,"minor":0}}}"#,
        r#"{"user":0,"call":{"Chown":{"path":"f","uid":null,"gid":null,"follow":true}}}"#,
        r#"{"user":0,"call":{"Mkdir":{"path":"d","mode":1517}}}"#,
        r#"{"user":0,"call":{"Chown":{"path":"d","uid":null,"gid":null,"follow":true}}}"#,
        r#"{"user":0,"call":{"SetFlags":{"path":"f","flags":16}}}"#,
        r#"{"user":0,"call":{"Chown":{"path":"f","uid":null,"gid":null,"follow":true}}}"#,
    ]);
}

#[test]
fn only_the_times_differ_of_a_pipe_that_is_written_to() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let steps = [
        r#"{"user":0,"call":{"Mknod":{"path":"p","kind":"Fifo","mode":438,"major":0,"minor":0}}}"#,
        r#"{"user":0,"call":{"Open":{"slot":4,"path":"p","flags":2,"mode":0}}}"#,
        r#"{"user":0,"call":{"Write":{"slot":4,"data":{"seed":1,"len":64}}}}"#,
    ];
    let steps = steps.iter().map(|step| serde_json::from_str(step).unwrap()).collect();
    let outcome = run(&Setup::new(Path::new(UBTRFS)), Source::Steps(steps)).unwrap();
    assert!(outcome.failure.is_none(), "{}", outcome.failure.unwrap().text);
    assert!(outcome.allowed.keys().all(|name| *name == "times-of-pipes"), "{:?}", outcome.allowed);
}

/// User 7 is root without capabilities. User 8 has only CAP_FOWNER. User 11 has CAP_DAC_OVERRIDE and CAP_SYS_ADMIN.
#[test]
fn capabilities_decide_on_trusted_attributes_and_chown_to_nobody_and_user_ids_do_not() {
    agree(&[
        r#"{"user":0,"call":{"Mknod":{"path":"f","kind":"File","mode":3583,"major":0,"minor":0}}}"#,
        r#"{"user":0,"call":{"Chown":{"path":"f","uid":1001,"gid":1001,"follow":true}}}"#,
        r#"{"user":11,"call":{"Setxattr":{"path":"f","name":"trusted.t","value":{"seed":1,"len":10},"flags":0}}}"#,
        r#"{"user":7,"call":{"Setxattr":{"path":"f","name":"trusted.t","value":{"seed":2,"len":10},"flags":0}}}"#,
        r#"{"user":7,"call":{"Removexattr":{"path":"f","name":"trusted.t"}}}"#,
        r#"{"user":11,"call":{"Removexattr":{"path":"f","name":"trusted.t"}}}"#,
        r#"{"user":0,"call":{"Chmod":{"path":"f","mode":3583}}}"#,
        r#"{"user":8,"call":{"Chown":{"path":"f","uid":null,"gid":null,"follow":true}}}"#,
    ]);
}

#[test]
fn the_mode_of_a_new_subvolume_allows_no_more_than_the_default_acl_of_its_directory() {
    let any = u32::MAX;
    agree(&[
        r#"{"user":0,"call":{"Mkdir":{"path":"d","mode":511}}}"#,
        &format!(
            r#"{{"user":0,"call":{{"SetAcl":{{"path":"d","default":true,"acl":[[1,6,{any}],[2,7,1001],[4,4,{any}],[16,5,{any}],[32,2,{any}]]}}}}}}"#
        ),
        r#"{"user":0,"call":{"SubvolCreate":{"path":"d/s"}}}"#,
        r#"{"user":0,"call":"Compare"}"#,
    ]);
}

#[test]
fn the_times_of_a_directory_in_place_of_a_left_out_subvolume_may_change_with_a_mount() {
    agree(&[
        r#"{"user":0,"call":{"SubvolCreate":{"path":"a"}}}"#,
        r#"{"user":0,"call":{"SubvolSnapshot":{"from":"","to":"s","read_only":false}}}"#,
        r#"{"user":0,"call":{"Readdir":{"path":"s/a"}}}"#,
        r#"{"user":0,"call":{"Open":{"slot":2,"path":"s/f","flags":576,"mode":416}}}"#,
        r#"{"user":0,"call":"Remount"}"#,
    ]);
}

#[test]
fn files_without_a_name_get_one_and_mappings_are_stored() {
    let steps = [
        r#"{"user":0,"call":{"Mkdir":{"path":"d","mode":1023}}}"#,
        r#"{"user":1,"call":{"Open":{"slot":0,"path":"d","flags":4259842,"mode":416}}}"#,
        r#"{"user":1,"call":{"Pwrite":{"slot":0,"at":0,"data":{"seed":1,"len":9000}}}}"#,
        r#"{"user":1,"call":{"Map":{"slot":0,"len":9000,"write":true}}}"#,
        r#"{"user":1,"call":{"LinkSlot":{"slot":0,"to":"d/f"}}}"#,
        r#"{"user":1,"call":{"MapStore":{"slot":0,"at":5000,"data":{"seed":2,"len":3000}}}}"#,
        r#"{"user":1,"call":{"MapSync":{"slot":0}}}"#,
        r#"{"user":1,"call":{"MapLoad":{"slot":0,"at":4000,"len":3000}}}"#,
        r#"{"user":1,"call":{"Pread":{"slot":0,"at":0,"len":9000}}}"#,
        r#"{"user":0,"call":"Remount"}"#,
    ];
    agree_but(&steps, &["times-of-mappings"]);
}

#[test]
fn truncation_with_the_right_to_keep_them_keeps_set_id_bits() {
    agree(&[
        r#"{"user":9,"call":{"Stat":{"path":"","follow":true}}}"#,
        r#"{"user":0,"call":{"Open":{"slot":0,"path":"f","flags":66,"mode":3583}}}"#,
        r#"{"user":9,"call":{"Ftruncate":{"slot":0,"len":1000}}}"#,
        r#"{"user":3,"call":{"Ftruncate":{"slot":0,"len":2000}}}"#,
    ]);
}

#[test]
fn an_attribute_that_fits_nowhere_is_no_space_also_where_there_is_none_to_replace() {
    agree(&[
        r#"{"user":0,"call":{"Mkdir":{"path":"d","mode":511}}}"#,
        r#"{"user":0,"call":{"Setxattr":{"path":"d","name":"user.a","value":{"seed":1,"len":60000},"flags":2}}}"#,
        r#"{"user":0,"call":{"Setxattr":{"path":"d","name":"user.a","value":{"seed":1,"len":100},"flags":2}}}"#,
        r#"{"user":0,"call":{"Setxattr":{"path":"d","name":"user.a","value":{"seed":1,"len":100},"flags":1}}}"#,
        r#"{"user":0,"call":{"Setxattr":{"path":"d","name":"user.a","value":{"seed":1,"len":60000},"flags":1}}}"#,
    ]);
}

#[test]
fn a_compression_property_of_a_device_is_not_kept() {
    agree(&[
        r#"{"user":0,"call":{"Mknod":{"path":"n","kind":"CharDevice","mode":511,"major":0,"minor":0}}}"#,
        r#"{"user":0,"call":{"SetProperty":{"path":"n","value":"zstd"}}}"#,
        r#"{"user":0,"call":{"SetProperty":{"path":"n","value":"lzma"}}}"#,
        r#"{"user":0,"call":{"Removexattr":{"path":"n","name":"btrfs.compression"}}}"#,
    ]);
}

#[test]
fn capabilities_decide_who_may_set_flags() {
    agree(&[
        r#"{"user":0,"call":{"Mkdir":{"path":"d","mode":511}}}"#,
        r#"{"user":0,"call":{"Chown":{"path":"d","uid":1001,"gid":1001,"follow":true}}}"#,
        r#"{"user":8,"call":{"SetFlags":{"path":"d","flags":64}}}"#,
        r#"{"user":3,"call":{"SetFlags":{"path":"d","flags":0}}}"#,
        r#"{"user":7,"call":{"SetFlags":{"path":"d","flags":0}}}"#,
        r#"{"user":1,"call":{"SetFlags":{"path":"d","flags":16}}}"#,
        r#"{"user":0,"call":{"SetFlags":{"path":"d","flags":16}}}"#,
        r#"{"user":0,"call":{"SetFlags":{"path":"d","flags":0}}}"#,
    ]);
}

#[test]
fn chown_keeps_set_group_id_that_the_group_cannot_execute_for_the_old_group_and_root() {
    agree(&[
        r#"{"user":0,"call":{"Open":{"slot":0,"path":"f","flags":66,"mode":448}}}"#,
        r#"{"user":0,"call":{"Fchmod":{"slot":0,"mode":1472}}}"#,
        r#"{"user":0,"call":{"Fchown":{"slot":0,"uid":null,"gid":1003}}}"#,
        r#"{"user":0,"call":{"Chown":{"path":"f","uid":1001,"gid":1001,"follow":true}}}"#,
        r#"{"user":5,"call":{"Chown":{"path":"f","uid":null,"gid":2000,"follow":true}}}"#,
        r#"{"user":9,"call":{"Chown":{"path":"f","uid":null,"gid":1001,"follow":true}}}"#,
        r#"{"user":0,"call":{"Chown":{"path":"f","uid":1001,"gid":1003,"follow":true}}}"#,
        r#"{"user":1,"call":{"Chown":{"path":"f","uid":null,"gid":1001,"follow":true}}}"#,
    ]);
}

#[test]
fn a_file_that_was_open_before_it_was_append_only_takes_copies() {
    agree(&[
        r#"{"user":0,"call":{"Open":{"slot":0,"path":"from","flags":66,"mode":448}}}"#,
        r#"{"user":0,"call":{"Write":{"slot":0,"data":{"seed":1,"len":9000}}}}"#,
        r#"{"user":0,"call":{"Open":{"slot":1,"path":"to","flags":66,"mode":448}}}"#,
        r#"{"user":0,"call":{"Write":{"slot":1,"data":{"seed":2,"len":20000}}}}"#,
        r#"{"user":0,"call":{"SetFlags":{"path":"to","flags":32}}}"#,
        r#"{"user":0,"call":{"CopyFileRange":{"from":0,"from_at":0,"to":1,"to_at":0,"len":4096}}}"#,
        r#"{"user":0,"call":{"CopyFileRange":{"from":0,"from_at":10,"to":1,"to_at":5000,"len":3000}}}"#,
        r#"{"user":0,"call":{"Ftruncate":{"slot":1,"len":30000}}}"#,
        r#"{"user":0,"call":{"SetFlags":{"path":"to","flags":16}}}"#,
        r#"{"user":0,"call":{"CopyFileRange":{"from":0,"from_at":0,"to":1,"to_at":0,"len":4096}}}"#,
        r#"{"user":0,"call":{"Ftruncate":{"slot":1,"len":30000}}}"#,
    ]);
}

#[test]
fn only_the_right_to_keep_them_keeps_set_id_bits_of_a_file_that_changes() {
    agree(&[
        r#"{"user":0,"call":{"Open":{"slot":0,"path":"f","flags":66,"mode":511}}}"#,
        r#"{"user":0,"call":{"Fchmod":{"slot":0,"mode":3583}}}"#,
        r#"{"user":0,"call":{"Open":{"slot":1,"path":"from","flags":66,"mode":511}}}"#,
        r#"{"user":0,"call":{"Write":{"slot":1,"data":{"seed":1,"len":9000}}}}"#,
        r#"{"user":7,"call":{"CopyFileRange":{"from":1,"from_at":9000,"to":0,"to_at":0,"len":100}}}"#,
        r#"{"user":9,"call":{"CopyFileRange":{"from":1,"from_at":0,"to":0,"to_at":0,"len":100}}}"#,
        r#"{"user":7,"call":{"CopyFileRange":{"from":1,"from_at":0,"to":0,"to_at":0,"len":100}}}"#,
    ]);
}

#[test]
fn the_documentation_names_every_difference_that_passes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/conformance.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, section) = text.split_once("\n## Against Linux's btrfs\n").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let listed: BTreeSet<&str> = section
        .lines()
        .filter_map(|line| line.strip_prefix("- `"))
        .filter_map(|line| line.split_once('`').map(|(name, _)| name))
        .collect();
    let passing: BTreeSet<&str> = ALLOWED.iter().chain(KNOWN).map(|entry| entry.name).collect();
    assert_eq!(listed, passing);
}

#[test]
fn a_special_file_made_without_copy_on_write_takes_no_compression_property() {
    agree(&[
        r#"{"user":0,"call":{"Mkdir":{"path":"d","mode":511}}}"#,
        r#"{"user":0,"call":{"SetFlags":{"path":"d","flags":8388608}}}"#,
        r#"{"user":0,"call":{"Mknod":{"path":"d/pipe","kind":"Fifo","mode":438,"major":0,"minor":0}}}"#,
        r#"{"user":0,"call":{"SetProperty":{"path":"d/pipe","value":"none"}}}"#,
        r#"{"user":0,"call":{"SetProperty":{"path":"d/pipe","value":""}}}"#,
    ]);
}
