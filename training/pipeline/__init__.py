"""Pipeline parallelism: schedules as programs, their proof, their time, and the stages that run them."""
