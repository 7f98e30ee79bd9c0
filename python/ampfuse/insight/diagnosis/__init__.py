"""The doctor: runs a training script for some steps and says where its time goes.

``session``  ``with insight.doctor() as report:``, and what the command does around a script
``watch``    counts optimizer steps, times some, profiles some
``marks``    annotations in the profile: steps, and the lines that wait for the device
``trace``    the profile as events that know their parents
``kinds``    which kind of work an operation is
``timeline`` each microsecond of the steps, given to one kind
``replay``   the script's own operations, timed again in another dtype, layout or shape
``advice``   what would pay, by how much
``report``   what came out, as data and as text
``page``     the same as one HTML file
"""
