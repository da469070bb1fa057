//! The bare limits of this machine, measured as the group uses them.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::Instant;

use super::Fault;

const SAMPLES: usize = 1_000;
/// About one log record.
const BYTES: usize = 256;

/// `write` + `fdatasync` of one small record, in ms.
pub(crate) fn fdatasync(dir: &Path) -> Result<Vec<f64>, Fault> {
    let path = dir.join("fdatasync");
    let mut file = File::create(&path)?;
    let record = [7_u8; BYTES];
    let mut samples = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        let began = Instant::now();
        file.write_all(&record)?;
        file.sync_data()?;
        samples.push(began.elapsed().as_secs_f64() * 1_000.0);
    }
    std::fs::remove_file(path)?;
    Ok(samples)
}

/// A small message to another thread and back over TCP on loopback, in ms.
pub(crate) fn round_trip() -> Result<Vec<f64>, Fault> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let echo = std::thread::spawn(move || -> std::io::Result<()> {
        let mut message = [0_u8; BYTES];
        for _ in 0..SAMPLES {
            far.read_exact(&mut message)?;
            far.write_all(&message)?;
        }
        Ok(())
    });
    let mut message = [7_u8; BYTES];
    let mut samples = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        let began = Instant::now();
        near.write_all(&message)?;
        near.read_exact(&mut message)?;
        samples.push(began.elapsed().as_secs_f64() * 1_000.0);
    }
    echo.join().map_err(|_| "the echo thread panicked")??;
    Ok(samples)
}
