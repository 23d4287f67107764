//! Makes random system calls on our mount and on Linux's btrfs and compares the answers, for a given time: `cargo build
//! --release -p ubtrfs-cli && cargo run --release -p ubtrfs-testkit --example differential -- --minutes 240`.
//!
//! `--seed N` sets the first seed. `--steps N` sets the length of a round. `--first` stops at the first difference.
//! `--survey` prints each kind of difference and continues the round. `--mount OPTIONS` sets mount options of our
//! mount. `--script FILE` performs the steps in a file, one line of JSON each, as a failure prints them; `--shrink`
//! removes the steps that are not needed for a difference. The tested program is the `ubtrfs` beside the examples, or
//! the program in the variable `UBTRFS`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ubtrfs_testkit::capability;
use ubtrfs_testkit::differential::{Options, Setup, Source, Step, run, run_rounds, shrink};

fn main() -> Result<()> {
    ensure!(capability::fuse() && capability::kernel_oracle(), "needs root, FUSE and the kernel's btrfs");
    let mut options = Options {
        setups: vec![Setup::new(&program()?)],
        seed: 1,
        steps: 1000,
        time: Duration::from_secs(60),
        stop_at_first: false,
        rounds: usize::MAX,
        shrink_time: Duration::from_secs(300),
    };
    let mut script = None;
    let mut smaller = false;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--minutes" => options.time = Duration::from_secs(60 * value()?.parse::<u64>()?),
            "--seed" => options.seed = value()?.parse()?,
            "--steps" => options.steps = value()?.parse()?,
            "--first" => options.stop_at_first = true,
            "--survey" => options.setups.iter_mut().for_each(|setup| setup.survey = true),
            "--shrink" => smaller = true,
            "--mount" => {
                let mount = value()?;
                options.setups.iter_mut().for_each(|setup| setup.ubtrfs_options.clone_from(&mount));
            }
            "--script" => script = Some(PathBuf::from(value()?)),
            _ => bail!("unknown argument {arg}"),
        }
    }
    if let Some(script) = script {
        return repeat(&options, &script, smaller);
    }
    match run_rounds(&options) {
        Ok(summary) => println!("{summary}"),
        Err(failures) => {
            println!("{failures}");
            std::process::exit(1);
        }
    }
    Ok(())
}

fn repeat(options: &Options, script: &Path, smaller: bool) -> Result<()> {
    let text = std::fs::read_to_string(script).with_context(|| script.display().to_string())?;
    let steps = text.lines().filter(|line| line.starts_with('{')).map(serde_json::from_str::<Step>);
    let outcome = run(&options.setups[0], Source::Steps(steps.collect::<Result<_, _>>()?))?;
    let Some(mut failure) = outcome.failure else {
        println!("no difference in {} steps; allowed: {:?}", outcome.steps.len(), outcome.allowed);
        return Ok(());
    };
    if smaller {
        let steps;
        (steps, failure) = shrink(&options.setups[0], outcome.steps, failure, options.shrink_time);
        for step in steps {
            println!("{}", serde_json::to_string(&step)?);
        }
    }
    bail!("{}", failure.text)
}

fn program() -> Result<PathBuf> {
    if let Some(program) = std::env::var_os("UBTRFS") {
        return Ok(program.into());
    }
    let here = std::env::current_exe()?;
    let program = here.parent().and_then(Path::parent).context("no directory")?.join("ubtrfs");
    ensure!(
        program.exists(),
        "there is no {}; build it with: cargo build -p ubtrfs-cli (--release)",
        program.display()
    );
    Ok(program)
}
